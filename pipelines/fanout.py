"""Pending tasks handed to a pool of actors by Ray Data: exact resume, backpressure and retries.

Only descriptions of tasks and manifest rows travel, as JSON; an actor writes its shard itself.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash_core.errors import DFlashError
from pipelines.cluster import require_room
from pipelines.ray_process import is_debug
from pipelines.worker_errors import WorkerError

Task = dict[str, Any]
Row = dict[str, Any]
Worker = Callable[[Task], Row]

_COLUMN = "json"


def fan_out(
    worker_cls: Callable[..., Worker],
    worker_kwargs: Mapping[str, Any],
    tasks: Sequence[Task],
    *,
    num_actors: tuple[int, int],
    num_cpus: float,
    num_gpus: float = 0.0,
    max_retries: int = 3,
) -> Iterator[Row]:
    """Rows of `worker_cls(**worker_kwargs)(task)`, as they come, in no particular order.

    Tasks and rows are plain JSON data (a tuple arrives as a list). Up to `num_actors[1]` actors run,
    each reserving `num_cpus` and `num_gpus` and making its worker once, at its first task; as few as
    `num_actors[0]` are enough to go on. An actor that dies (killed, out of memory) is replaced and
    its task is given out again, up to `max_retries` times. What a worker raises is raised here as it
    is, at once. Closing the iterator ends the actors. The caller is connected to Ray already.

    Raises DFlashError when a task outlives its retries, UserError when not even the fewest actors
    have room in the cluster.
    """
    if not tasks:
        return
    import ray.data
    from ray.exceptions import RayError

    fewest, most = min(num_actors[0], len(tasks)), min(num_actors[1], len(tasks))
    require_room(fewest, num_cpus=num_cpus, num_gpus=num_gpus)
    _hush()
    dataset = _dataset(
        tasks,
        {"worker_cls": worker_cls, "worker_kwargs": dict(worker_kwargs)},
        # One task at a time: a second one in an actor's queue would wait there while others idle.
        compute=ray.data.ActorPoolStrategy(
            min_size=fewest, max_size=most, initial_size=most, max_tasks_in_flight_per_actor=1
        ),
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_task_retries=max_retries,
    )
    try:
        for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
            for text in batch[_COLUMN]:
                yield _row(json.loads(text))
    except RayError as error:
        raise DFlashError(
            f"a worker process died {max_retries + 1} times over one task ({_first_line(error)}): "
            "most often memory ran out, so rerun with fewer actors or smaller batches"
        ) from error


def _dataset(tasks: Sequence[Task], maker: dict[str, Any], **pool: Any) -> Any:
    """A block per task, so that tasks are given out, retried and reported one by one."""
    import ray.data

    items = [{_COLUMN: json.dumps(task)} for task in tasks]
    dataset = ray.data.from_items(items, override_num_blocks=len(items))
    with warnings.catch_warnings():
        # Ray 2.60 says that `max_task_retries` will move, and has no other place for it yet.
        warnings.simplefilter("ignore", category=DeprecationWarning)
        return dataset.map_batches(_Actor, fn_constructor_kwargs=maker, batch_size=1, **pool)


class _Actor:
    """What Ray Data runs: a worker, made at the first task.

    An exception is returned as a row, since Ray would wrap it in its own, print it, and retry the
    constructor; returning it keeps the class, the message and the one place where it is raised.
    """

    def __init__(self, worker_cls: Callable[..., Worker], worker_kwargs: dict[str, Any]) -> None:
        self._make = lambda: worker_cls(**worker_kwargs)
        self._worker: Worker | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        (text,) = batch[_COLUMN]
        try:
            if self._worker is None:
                self._worker = self._make()
            answer = json.dumps({"row": self._worker(json.loads(text))})
        except Exception as error:  # noqa: BLE001 - carried to the driver, whatever it is
            answer = json.dumps({"error": WorkerError.of(error).packed})
        return {_COLUMN: [answer]}


def _row(answer: dict[str, Any]) -> Row:
    if "error" in answer:
        raise WorkerError(answer["error"]).original()
    row: Row = answer["row"]
    return row


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".:")


def _hush() -> None:
    """Keep Ray Data from reporting progress and statistics: the flow has its own."""
    from ray.data import DataContext

    context = DataContext.get_current()
    debug = is_debug()
    context.enable_progress_bars = debug
    context.print_on_execution_start = debug
    if not debug:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
