"""Training through Ray Train: started, followed, resumed, and its errors told as they are.

What makes Ray Train quick enough for short trainings (facts of Ray 2.60): it hands a report on only
when it polls its workers, and `ray.train.report` waits for that, so the interval is cut from 2 s;
a lone worker needs no process group, and without one the controller is spared importing torch.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from dflash_core.errors import DFlashError
from pipelines.cluster import require_room
from pipelines.openmp import spin_briefly
from pipelines.worker_errors import WorkerError

Metrics = dict[str, Any]
TrainFunction = Callable[[dict[str, Any]], None]

POLL_SECONDS = 0.2
ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": str(POLL_SECONDS),
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # Workers stay in the folder they are started in, so that relative paths keep their meaning.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
CHECKPOINTS_KEPT = 2


def run_training(
    train_fn: TrainFunction,
    config: dict[str, Any],
    *,
    num_workers: int,
    use_gpu: bool,
    storage_path: str,
    name: str,
    max_failures: int = 3,
    cpus_per_worker: float = 1.0,
    on_report: Callable[[Metrics], None] | None = None,
) -> Metrics:
    """Run `train_fn(config)` on `num_workers` workers; returns the last metrics that rank 0 reported.

    Every worker reports with `ray.train.report(metrics, checkpoint=...)`; rank 0's metrics, plain
    JSON data, reach `on_report` as they come, in a thread of its own while this one waits. The last
    checkpoint under `storage_path`/`name` is what `ray.train.get_checkpoint()` gives the workers, in
    a rerun of a killed driver as after a worker's death, of which `max_failures` are made up for.
    Several workers find a torch process group set up. With nothing left to report the answer is {}.

    What `train_fn` raises is raised here as it is: at once from a lone worker, as is any DFlashError;
    otherwise after `max_failures`, for a worker may fail only because another one died. Raises
    DFlashError if workers die more often, UserError if the cluster has no room for them.
    """
    require_room(num_workers, num_cpus=cpus_per_worker, num_gpus=int(use_gpu))
    _set_environment()
    with tempfile.TemporaryDirectory(prefix="dflash-train-") as folder:
        reports = Path(folder) / "reports.jsonl"
        reports.touch()
        trainer = _trainer_class(num_workers)(
            partial(_guarded, train_fn),
            train_loop_config=config,
            scaling_config=ScalingConfig(
                num_workers=num_workers,
                use_gpu=use_gpu,
                resources_per_worker={"CPU": cpus_per_worker, **({"GPU": 1} if use_gpu else {})},
            ),
            run_config=RunConfig(
                name=name,
                **_storage(storage_path),
                checkpoint_config=CheckpointConfig(num_to_keep=CHECKPOINTS_KEPT),
                failure_config=FailureConfig(
                    max_failures=max_failures, controller_failure_limit=max_failures
                ),
                callbacks=[_Follower(str(reports), lone=num_workers == 1)],
            ),
        )
        with _Tail(reports, on_report) as tail:
            _fit(trainer, max_failures)
    return tail.last


def _storage(location: str) -> dict[str, Any]:
    """Where Ray Train keeps checkpoints; it speaks to any filesystem that fsspec knows."""
    if "://" not in location:
        return {"storage_path": str(Path(location).resolve())}
    from fsspec.core import url_to_fs
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    filesystem, path = url_to_fs(location)
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(filesystem))}


def _fit(trainer: Any, max_failures: int) -> None:
    """Run the training to its end; Ctrl-C ends it as it ends anything else.

    Ray Train would answer SIGINT with a handler that exits with 0 and stays installed. It is asked
    for with the controller in hand, which is what has to die for an interrupted training to end.
    """
    import ray

    controllers: list[Any] = []
    trainer._register_sigint_handler = controllers.append  # noqa: SLF001
    _dismiss_idle_helpers(trainer)
    try:
        trainer.fit()
    except Exception as error:
        raise _told(error, max_failures) from error
    except BaseException:
        for controller in controllers:
            ray.kill(controller)
        raise


def _dismiss_idle_helpers(trainer: Any) -> None:
    """Spare two processes, of some three CPU seconds each, that would have nothing to do.

    One hands out Ray Data sets, of which there are none. The other tidies up after a controller that
    died alone, which on a single node it doesn't. Should Ray rename them, they come back.
    """
    idle = {"DatasetsCallback", *(["PlacementGroupCleanerCallback"] if _single_node() else [])}
    make = trainer._create_default_callbacks  # noqa: SLF001
    trainer._create_default_callbacks = lambda: [c for c in make() if type(c).__name__ not in idle]  # noqa: SLF001


def _single_node() -> bool:
    import ray

    return len(ray.nodes()) == 1


def _set_environment() -> None:
    """Ray Train's settings are environment variables; what the user set stays."""
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if _single_node():  # nothing that could be taken away but the driver's own machine
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")


def _trainer_class(num_workers: int) -> Any:
    if num_workers == 1:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        return DataParallelTrainer
    from ray.train.torch import TorchTrainer

    return TorchTrainer


def _guarded(train_fn: TrainFunction, config: dict[str, Any]) -> None:
    """What a worker runs."""
    spin_briefly()
    try:
        train_fn(config)
    except Exception as error:  # noqa: BLE001 - carried to the driver, whatever it is
        raise WorkerError.of(error) from None


class _Follower(UserCallback):
    """Runs in Ray Train's controller, on the driver's node: passes reports on, and errors that are final.

    What a callback raises ends the training; an error that it lets pass is retried.
    """

    def __init__(self, reports: str, *, lone: bool) -> None:
        self._reports, self._lone = reports, lone

    def after_report(self, run_context: Any, metrics: list[Metrics], checkpoint: Any) -> None:  # noqa: ARG002
        with suppress(OSError), Path(self._reports).open("a") as stream:  # progress is no reason to fail
            stream.write(json.dumps(metrics[0], default=float) + "\n")

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        for error in worker_exceptions.values():
            if isinstance(error, WorkerError) and (self._lone or isinstance(error.original(), DFlashError)):
                raise error


class _Tail:
    """Hands on the lines of `reports` as they are written, from a thread, until the block is over."""

    def __init__(self, reports: Path, on_report: Callable[[Metrics], None] | None) -> None:
        self.last: Metrics = {}
        self._reports, self._on_report = reports, on_report
        self._error: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="training-reports", daemon=True)

    def __enter__(self) -> _Tail:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            for metrics in self._lines():
                self.last = metrics
                if self._on_report is not None:
                    self._on_report(metrics)
        except Exception as error:  # noqa: BLE001 - raised when the block is left
            self._error = error

    def _lines(self) -> Iterator[Metrics]:
        over, rest = False, ""
        with self._reports.open() as stream:
            while not over:
                over = self._over.wait(POLL_SECONDS)
                *lines, rest = (rest + stream.read()).split("\n")
                yield from map(json.loads, lines)


def _told(error: Exception, max_failures: int) -> Exception:
    """The exception that the caller should see for one of `fit`."""
    failures = [getattr(error, "controller_failure", None), *getattr(error, "worker_failures", {}).values()]
    for failure in failures:
        if isinstance(failure, WorkerError):
            return failure.original()
    if not hasattr(error, "worker_failures"):
        return error
    death = getattr(failures[-1], "health_check_failure", failures[-1])
    reason = str(death).strip().split("\n", 1)[0].rstrip(".:")
    return DFlashError(
        f"training failed {max_failures + 1} times because a worker process died ({reason}): "
        "most often memory ran out, so rerun with fewer batch tokens; it continues from its last checkpoint"
    )
