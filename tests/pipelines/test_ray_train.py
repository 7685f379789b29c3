"""Training through a real Ray Train: followed, resumed, its errors told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import UserError
from pipelines.cluster import ClusterInfo
from tests.pipelines.processes import end_session, processes_of, until
from tests.pipelines.ray_workers import count_up

DRIVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from pipelines.cluster import connect, disconnect
connect("local", num_cpus=2)
from pipelines.ray_train import run_training
from tests.pipelines.ray_workers import count_up
folder, config = sys.argv[2], json.loads(sys.argv[3])
def log(metrics):
    with (Path(folder) / "reports").open("a") as stream:
        stream.write(f"{metrics['step']}\\n")
last = run_training(count_up, {"folder": folder, **config}, num_workers=1, use_gpu=False,
                    storage_path=folder, name="run", on_report=log)
disconnect()
print(json.dumps(last))
"""


def train(folder: Path, num_workers: int = 1, **config: Any) -> tuple[dict[str, Any], list[int]]:
    from pipelines.ray_train import run_training

    steps: list[int] = []
    last = run_training(
        count_up,
        {"folder": str(folder), "steps": 5, **config},
        num_workers=num_workers,
        use_gpu=False,
        storage_path=str(folder),
        name="run",
        on_report=lambda metrics: steps.append(metrics["step"]),
    )
    return last, steps


def starts(folder: Path, rank: int = 0) -> list[int]:
    """The step at which each attempt began."""
    return [int(line) for line in (folder / f"starts-{rank}").read_text().split()]


def test_a_killed_worker_goes_on_from_its_last_checkpoint(local_ray: ClusterInfo, tmp_path: Path) -> None:
    last, steps = train(tmp_path, die_at=3)
    began = starts(tmp_path)
    assert len(began) == 2
    assert began[0] == 0
    assert 1 <= began[1] <= 3
    assert last == {"step": 5, "resumed_at": began[1]}
    assert steps[0] == 1
    assert steps[-1] == 5


def test_a_users_mistake_is_raised_at_once(local_ray: ClusterInfo, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train(tmp_path, refuse=True)
    assert str(caught.value) == "learning rate 7 is refused: give 1"
    assert starts(tmp_path) == [0]


@pytest.mark.slow
def test_workers_are_one_process_group(local_ray: ClusterInfo, tmp_path: Path) -> None:
    last, _ = train(tmp_path, num_workers=2, add_up=True)
    assert last["step"] == 5
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in (0, 1)] == ["3.0", "3.0"]


def driver(folder: Path, temporary: Path, **config: Any) -> subprocess.Popen[str]:
    """A process that trains, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(Path(__file__).parents[2]), str(folder), json.dumps(config)],
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )


def reached(folder: Path) -> bool:
    """Whether the training waits where it was told to, and something was reported before."""
    return (folder / "waiting").exists() and (folder / "reports").exists()


@pytest.mark.slow
def test_a_rerun_after_a_killed_driver_continues(tmp_path: Path, short_folder: Path) -> None:
    first = driver(tmp_path, short_folder, steps=6, wait_at=4)
    try:
        until(lambda: reached(tmp_path), 120)
        first.kill()
        first.wait()
    finally:
        end_session(first.pid)
    second = driver(tmp_path, short_folder, steps=6)
    try:
        out, _ = second.communicate(timeout=200)
    finally:
        end_session(second.pid)
    assert second.returncode == 0
    began = starts(tmp_path)
    assert began[0] == 0
    assert 1 <= began[1] <= 4
    assert json.loads(out) == {"step": 6, "resumed_at": began[1]}


@pytest.mark.slow
def test_ctrl_c_ends_a_training_and_its_processes(tmp_path: Path, short_folder: Path) -> None:
    job = driver(tmp_path, short_folder, steps=6, wait_at=4)
    try:
        until(lambda: reached(tmp_path), 120)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(60) != 0
        until(lambda: not processes_of(job.pid))
    finally:
        end_session(job.pid)
