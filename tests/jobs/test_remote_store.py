"""The main job with its store in S3 (moto's server), and workers that share no disk with the driver."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import Home, last_json
from tests.pipelines.processes import end_session, until
from tests.pipelines.ray_nodes import free_port, is_open, ray_head

OFF = {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    """The environment under which `s3://bucket` is there."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        until(lambda: is_open(port), 60)
        make_bucket = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"
        subprocess.run([sys.executable, "-c", make_bucket], check=True, env=os.environ | environment)
        yield environment
    finally:
        end_session(server.pid)
        server.wait()


@pytest.mark.slow
def test_a_store_in_s3_serves_workers_that_share_no_disk_with_the_driver(
    make_home: Callable[[str], Home], s3: dict[str, str], tmp_path: Path
) -> None:
    home = make_home("s3")
    caches = {name: {"XDG_CACHE_HOME": str(tmp_path / name)} for name in ("driver", "workers")}
    environment = os.environ | OFF | s3 | caches["driver"]
    with ray_head(**OFF, **s3, **caches["workers"]) as address:
        arguments = home.arguments(home.target, "--json", "--store", "s3://bucket/store")
        done = home.run("realign.py", [*arguments, "--ray-address", address], env=environment)
        assert done.returncode == 0, done.stderr
        assert last_json(done.stdout)["outcome"] == "promoted"
    fetched = {path.name for path in (tmp_path / "workers").rglob("artifacts/*/*")}
    assert {"train-00000.jsonl", "gate.jsonl"} <= fetched
    assert not {path.name for path in (tmp_path / "driver").rglob("*.arrow")}
    # Without that cluster: a settled request needs none.
    again = home.run("realign.py", arguments, env=environment)
    assert last_json(again.stdout)["already_done"] is True
