"""What the tests of fan-out and training run inside Ray's processes."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.errors import UserError
from dflash_core.store.artifacts import Workspace
from pipelines.sharded import ShardWorker


class TwoPartError(Exception):
    """Pickles, and doesn't come back: its constructor wants more than its message."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because of {why}")


class TouchWorker:
    """Leaves a line for every attempt at a task, then does what the task says."""

    def __init__(self, folder: str, refuse: bool = False) -> None:
        if refuse:
            raise UserError("the folder is refused: give another")
        self.folder = Path(folder)

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        with (self.folder / task["name"]).open("a") as stream:
            stream.write(f"{os.getpid()}\n")
        attempts = attempts_at(self.folder, task["name"])
        if task["kind"] == "refuse":
            raise UserError(f"{task['name']} is refused: give another")
        if task["kind"] == "die" and attempts <= task["deaths"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if task["kind"] == "wait":
            wait_for(self.folder / task["for"])
        if task["kind"] == "meet":
            wait_for(self.folder / task["other"])
        return {"name": task["name"], "attempts": attempts, "task": task}


class PartWorker(ShardWorker):
    """Writes its task's name into its shard."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.guard = workspace, TargetGuard(Path("none"), "nowhere", {})

    def work(self, task: dict[str, Any]) -> dict[str, Any]:
        with self.workspace.scratch() as scratch:
            (scratch / "part").write_text(task["name"])
            self.workspace.put(task["name"], scratch / "part")
        return {"tokens": 10, "kinds": {"a": 1, "b": 2}}


def attempts_at(folder: Path, name: str) -> int:
    """How often a task was begun."""
    return len((folder / name).read_text().splitlines())


def wait_for(path: Path) -> None:
    """Return once `path` exists."""
    while not path.exists():
        time.sleep(0.02)


def count_up(config: dict[str, Any]) -> None:
    """A training that counts to `steps`, with a checkpoint at each, and stumbles where it is told to."""
    import ray.train

    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    done = 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            done = json.loads((Path(directory) / "done.json").read_text())
    with (folder / f"starts-{rank}").open("a") as stream:
        stream.write(f"{done}\n")
    if config.get("refuse"):
        raise UserError("learning rate 7 is refused: give 1")
    if config.get("add_up"):
        add_up(folder, rank)
    for step in range(done, config["steps"]):
        if step == config.get("die_at") and done == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == config.get("wait_at") and done == 0:
            (folder / "waiting").touch()
            wait_for(folder / "never")
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "done.json").write_text(json.dumps(step + 1))
            checkpoint = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
            ray.train.report({"step": step + 1, "resumed_at": done}, checkpoint=checkpoint)


def add_up(folder: Path, rank: int) -> None:
    """Prove that the workers are one process group."""
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    (folder / f"sum-{rank}").write_text(str(total.item()))
