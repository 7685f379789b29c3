"""A stage worked off shard by shard: what is done is kept, what is pending goes to a pool of actors.

Used by `generate`, `extract` and `evaluate`. The manifest row that an actor leaves in `rows/` after its
shard is what says that the shard is done, so a killed driver loses only the shards in flight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from dflash_core.artifacts import Workspace
from dflash_core.target_guard import TargetGuard
from pipelines.placement import Placement
from pipelines.telemetry import peak_rss_mb

Row = dict[str, Any]


class ShardWorker(ABC):
    """An actor's work: does a task, then leaves its manifest row."""

    guard: TargetGuard
    workspace: Workspace

    @abstractmethod
    def work(self, task: Row) -> Row:
        """Do `task` (its "name" is unique in the stage) and write its shard; returns a plain row."""

    def __call__(self, task: Row) -> Row:
        row = {"name": task["name"], **self.work(task), "peak_mb": round(peak_rss_mb())}
        self.guard.check()  # weights may be mapped, not read: what counts is that they stayed to the end
        self.workspace.put_json(_row_name(task), row)
        return row


def work_off(
    workspace: Workspace,
    worker: str,
    worker_arguments: dict[str, Any],
    tasks: list[Row],
    placement: Placement,
    connect: Callable[[], object],
    on_row: Callable[[Row, bool], None],
) -> list[Row]:
    """Rows of all tasks, in the tasks' order. `connect` is called only when work is left.

    worker: a class of `pipelines.workers`, by its name, or of another module of `pipelines`, as
    "module.Class": importing it here would load torch into the driver, which has no use for it.

    `on_row` sees every row once, those of an earlier run first, and whether this run made it.
    """
    rows: dict[str, Row] = {}
    for task in tasks:
        row = workspace.get_json(_row_name(task))
        if row is not None:
            rows[task["name"]] = row
            on_row(row, False)
    pending = [task for task in tasks if task["name"] not in rows]
    if pending:
        connect()
        from pipelines.pool import ActorSize, kept_pool

        pool = kept_pool(ActorSize(placement.cpus_per_actor, placement.gpus_per_actor))
        for row in pool.run(
            partial(_make, worker), worker_arguments, pending, num_actors=placement.num_actors
        ):
            rows[row["name"]] = row
            on_row(row, True)
    return [rows[task["name"]] for task in tasks]


def _make(worker: str, **arguments: Any) -> ShardWorker:
    module, _, name = worker.rpartition(".")
    made: ShardWorker = getattr(import_module(f"pipelines.{module or 'workers'}"), name)(**arguments)
    return made


def peak_memory(rows: list[Row]) -> int:
    """The largest actor's peak resident memory, in MB."""
    return max((row["peak_mb"] for row in rows), default=0)


def _row_name(task: Row) -> str:
    return f"rows/{task['name']}.json"
