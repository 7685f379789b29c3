"""What the tests of the Ray side share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.cluster import ClusterInfo, connect, disconnect
from pipelines.pool import release_actors


@pytest.fixture(scope="session")
def local_ray() -> Iterator[ClusterInfo]:
    """Two CPUs, started by the first test that asks, for all of them."""
    yield connect("local", num_cpus=2)
    disconnect()


@pytest.fixture(scope="module", autouse=True)
def _actors_let_go() -> Iterator[None]:
    """No module's kept actors take the room of the next one's."""
    yield
    release_actors()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
