"""Joining and starting Ray: what a job does by itself, what it is told, what it leaves behind."""

from __future__ import annotations

import http.server
import json
import os
import platform
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import UserError
from pipelines import local_ray
from pipelines.cluster import require_head
from pipelines.local_ray import cpu_budget
from pipelines.ray_job import JOB_CONFIG_VARIABLE, in_ray_job, stable_folder
from tests.pipelines.processes import end_session, processes_of, until
from tests.pipelines.ray_nodes import copy_packages, free_port, ray_head, ray_node

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, os, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipelines.cluster import connect
from pipelines.pool import ActorSize, Pool
from pipelines.ray_job import stable_folder

class Look:
    def __call__(self, task):
        import dflash_core.errors
        return {"errors": dflash_core.errors.__file__}

info = connect(sys.argv[2] or None, store_location=sys.argv[3] or None)
rows = list(Pool(ActorSize(0.5)).run(Look, {}, [{}], num_actors=1))
print(json.dumps({"local": info.local, "cpus": info.num_cpus, "nodes": info.num_nodes,
                  "errors": rows[0]["errors"], "folder": str(stable_folder()),
                  "auth": os.environ.get("RAY_AUTH_MODE")}), flush=True)
if info.local:
    threading.Event().wait()
"""


def start(address: str = "", store: str = "", **environment: str) -> subprocess.Popen[str]:
    """The driver, somewhere else than in the checkout, in a session of its own."""
    dropped = ("PYTHONPATH", "RAY_ADDRESS", "RAY_AUTH_MODE")
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(ROOT), address, store],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={k: v for k, v in os.environ.items() if k not in dropped} | environment,
        start_new_session=True,
    )


def run(address: str = "", store: str = "", **environment: str) -> tuple[dict[str, Any], str]:
    """What the driver printed as its result, and the last line of its stderr."""
    driver = start(address, store, **environment)
    try:
        out, err = driver.communicate(timeout=120)
    finally:
        end_session(driver.pid)
    return json.loads(out or "{}"), err.strip().rpartition("\n")[2]


def test_the_cpu_budget_is_the_affinity() -> None:
    mine = os.sched_getaffinity(0)
    assert 1 <= cpu_budget() <= len(mine)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert cpu_budget() == 1
    finally:
        os.sched_setaffinity(0, mine)


def test_defaults_stand_in_the_working_folder_but_for_the_copy_a_job_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    unpacked.mkdir(parents=True)
    monkeypatch.delenv(JOB_CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(unpacked)
    assert (in_ray_job(), stable_folder()) == (False, unpacked)
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, "{}")
    assert (in_ray_job(), stable_folder()) == (True, Path.home() / ".dflash")
    monkeypatch.chdir(tmp_path)  # a job without --working-dir runs in a folder that stays
    assert stable_folder() == tmp_path


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:8265", "http://127.0.0.1:8265 is the address of a Ray dashboard: .*HOST:6379"),
        ("ray://127.0.0.1:10001", "'ray://127.0.0.1:10001' is no address of a Ray cluster: .*HOST:6379"),
        ("headnode", "'headnode' is no address of a Ray cluster: .*HOST:6379"),
    ],
)
def test_an_address_that_can_be_none_is_refused(address: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        require_head(address)


def test_a_port_that_is_closed_or_no_rays_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot join .*no Ray head answers there.*ray start --head"):
        require_head(f"127.0.0.1:{free_port()}")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match="no Ray head answers there"):
            require_head(f"127.0.0.1:{server.server_port}")
        server.shutdown()


def test_a_local_ray_is_private_sees_our_code_and_ends_with_the_job(
    tmp_path: Path, short_folder: Path
) -> None:
    ends_on(signal.SIGTERM, 128 + signal.SIGTERM, tmp_path, short_folder)


@pytest.mark.slow
def test_a_local_ray_ends_on_ctrl_c(tmp_path: Path, short_folder: Path) -> None:
    ends_on(signal.SIGINT, 1, tmp_path, short_folder)


@pytest.mark.slow
def test_a_local_ray_ends_when_the_job_is_killed(tmp_path: Path, short_folder: Path) -> None:
    ends_on(signal.SIGKILL, -signal.SIGKILL, tmp_path, short_folder)


def ends_on(signum: int, code: int, home: Path, short_folder: Path) -> None:
    """Signal the whole process group, as a terminal does."""
    driver = start(HOME=str(home), RAY_TMPDIR=str(short_folder))
    try:
        assert driver.stdout is not None
        said = json.loads(driver.stdout.readline())
        assert said["local"]
        assert said["cpus"] == cpu_budget()
        assert said["errors"] == str(ROOT / "dflash_core" / "errors.py")
        assert said["auth"] == "token"
        assert not (home / ".ray").exists()
        assert len(processes_of(driver.pid)) > 3
        os.killpg(driver.pid, signum)
        out, _ = driver.communicate(timeout=60)
        assert (driver.returncode, out) == (code, "")
        until(lambda: not processes_of(driver.pid), 120)
        if signum != signal.SIGKILL:
            assert not list(short_folder.iterdir())
    finally:
        end_session(driver.pid)


@pytest.mark.slow
def test_a_running_cluster_is_joined_sent_our_code_and_left_running() -> None:
    with ray_head(RAY_AUTH_MODE="disabled") as address:
        for said, _ in (run(address), run(RAY_ADDRESS=address)):
            assert (said["local"], said["cpus"], said["nodes"]) == (False, 2, 1)
            assert "py_modules_files" in said["errors"]


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_says_so() -> None:
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef"}
    with ray_head(**token) as address:
        said, error = run(address)
        assert not said
        assert "asks for a token: set RAY_AUTH_MODE=token" in error
        said, _ = run(address, **token)
        assert said["cpus"] == 2


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from a node")
def test_a_store_that_a_node_does_not_see_is_refused(tmp_path: Path) -> None:
    hidden, shared = tmp_path / "hidden", tmp_path / "shared"
    hidden.mkdir()
    blind = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$0" "$@"')
    off = {"RAY_AUTH_MODE": "disabled"}
    with ray_head(**off) as address, ray_node(f"--address={address}", prefix=blind, **off):
        until(lambda: run(address, str(shared))[0].get("nodes") == 2, 200)
        said, error = run(address, str(hidden))
        assert not said
        assert f"the store {hidden} is not visible from the node" in error


@pytest.mark.slow
def test_a_submitted_job_uses_its_cluster_and_its_own_code(tmp_path: Path) -> None:
    copy_packages(ROOT, tmp_path)
    (tmp_path / "job.py").write_text(DRIVER)
    port = free_port()
    off = {"RAY_AUTH_MODE": "disabled"}
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", f"--address=http://127.0.0.1:{port}"]
    job = ["--working-dir=.", "--", sys.executable, "job.py", ".", "", ""]
    outputs: list[str] = []

    def submitted() -> bool:
        """`ray start` is ready before the agent that takes jobs is: try again."""
        done = subprocess.run(
            [*ray, *job], capture_output=True, text=True, cwd=tmp_path, env=os.environ | off, check=False
        )
        outputs.append(done.stdout + done.stderr)
        return done.returncode == 0

    with ray_head(dashboard_port=port, **off):
        until(submitted, 150)
    said = json.loads(next(line for line in outputs[-1].splitlines() if line.startswith('{"local"')))
    assert (said["local"], said["cpus"]) == (False, 2)
    assert "working_dir_files" in said["errors"]
    assert said["folder"] == str(Path.home() / ".dflash")


def test_what_a_killed_runs_ray_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    folders = {
        "left": (dead.pid, platform.node()),
        "alive": (os.getpid(), platform.node()),
        "another machine's": (dead.pid, "another"),
    }
    for name, (pid, host) in folders.items():
        folder = tmp_path / f"dflash-ray-{pid}-{len(name):08d}"
        folder.mkdir()
        (folder / "owner").write_text(host)
    (tmp_path / f"dflash-ray-{dead.pid}-unowned").mkdir()
    local_ray._sweep(tmp_path)
    assert {path.name.rpartition("-")[2] for path in tmp_path.iterdir()} == {
        "00000005",
        f"{len('another machine' + chr(39) + 's'):08d}",
        "unowned",
    }
