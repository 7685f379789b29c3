"""A stage worked off shard by shard: what is done is kept, what is pending goes to a pool of actors.

Used by `generate`, `extract` and `evaluate`. The manifest row that an actor leaves in `rows/` after its
shard is what says that the shard is done, so a killed driver loses only the shards in flight. Rows are
added up and let go: a driver of a hundred thousand shards holds none of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import chain
from typing import Any

from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.store.artifacts import Workspace
from dflash_core.store.workspace import ROWS, row_name
from pipelines.placement import Placement
from pipelines.telemetry import peak_rss_mb

Row = dict[str, Any]


class ShardWorker(ABC):
    """An actor's work: does a task, then leaves its manifest row."""

    guard: TargetGuard
    workspace: Workspace

    @abstractmethod
    def work(self, task: Row) -> Row:
        """Do `task` (its "name" is unique in the stage) and put its shard, if any, under that name.

        Returns a plain row.
        """

    def __call__(self, task: Row) -> Row:
        row = {"name": task["name"], **self.work(task), "peak_mb": round(peak_rss_mb())}
        shard = self.workspace.record(task["name"])
        row["bytes"] = shard.num_bytes if shard else 0
        self.guard.check()  # weights may be mapped, not read: what counts is that they stayed to the end
        self.workspace.put_json(row_name(task["name"]), row)
        return row


class Totals:
    """Rows added up: every number by its key, tables of numbers key by key."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self.peak_mb = 0
        """The largest actor's peak resident memory."""

    def add(self, row: Row) -> None:
        """Count `row` in."""
        self.peak_mb = max(self.peak_mb, row["peak_mb"])
        _add(self._sums, row)

    def __getitem__(self, key: str) -> Any:
        return self._sums.get(key, 0)

    def pick(self, *keys: str) -> dict[str, Any]:
        """The sums under `keys`; 0 for one that no row has."""
        return {key: self[key] for key in keys}


def work_off(
    workspace: Workspace,
    worker: str,
    worker_arguments: dict[str, Any],
    tasks: Iterable[Row],
    placement: Placement,
    connect: Callable[[], object],
    on_row: Callable[[Row, bool], None],
) -> Totals:
    """Work off all tasks; what their rows add up to. `connect` is called only when work is left.

    worker: a class of `pipelines.workers`, by its name, or of another module of `pipelines`, as
    "module.Class", or of any, as "package.module.Class": importing it here would load torch into the
    driver, which has no use for it. tasks: gone through more than once, and never held.

    `on_row` sees every row once, those of an earlier run first, and whether this run made it.
    """
    totals = Totals()

    def count(row: Row, fresh: bool) -> None:
        totals.add(row)
        on_row(row, fresh)

    done = set()
    for row in _earlier(workspace, tasks):
        done.add(row["name"])
        count(row, False)
    pending = (task for task in tasks if task["name"] not in done)
    if (first := next(pending, None)) is not None:
        connect()
        from pipelines.pool import ActorSize, kept_pool

        pool = kept_pool(ActorSize(placement.cpus_per_actor, placement.gpus_per_actor))
        for row in pool.run(
            partial(_make, worker),
            worker_arguments,
            chain([first], pending),
            num_actors=placement.num_actors,
            min_actors=placement.min_actors,
            release_idle=placement.release_idle,
        ):
            count(row, True)
    return totals


def _earlier(workspace: Workspace, tasks: Iterable[Row]) -> Iterator[Row]:
    """Rows that an earlier run left, whose shards are still as they were put."""
    rows = workspace.json_files(ROWS)
    if (first := next(rows, None)) is None:
        return
    names, sizes = {task["name"] for task in tasks}, workspace.sizes()
    for _, row in chain([first], rows):
        if row["name"] in names and row.get("bytes", 0) == sizes.get(row["name"], 0):
            yield row


def _add(sums: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _add(sums.setdefault(key, {}), value)
        elif isinstance(value, (int, float)):
            sums[key] = sums.get(key, 0) + value


def _make(worker: str, **arguments: Any) -> ShardWorker:
    module, _, name = worker.rpartition(".")
    path = module if "." in module else f"pipelines.{module or 'workers'}"
    made: ShardWorker = getattr(import_module(path), name)(**arguments)
    return made
