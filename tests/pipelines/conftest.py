"""A local Ray for the tests that need one: two CPUs, started by the first of them, for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipelines.cluster import ClusterInfo, connect, disconnect


@pytest.fixture(scope="session")
def local_ray() -> Iterator[ClusterInfo]:
    yield connect("local", num_cpus=2)
    disconnect()
