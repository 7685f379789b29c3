"""Actors that outlive a stage, and pending tasks handed to whichever of them is free.

Starting an actor costs seconds (it imports torch) and loading a target minutes; one pool therefore
serves a night's stages in turn. Only descriptions of tasks and manifest rows travel, as JSON; an actor
writes its shard itself.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any
from uuid import uuid4

from dflash_core.errors import DFlashError
from pipelines.cluster import require_room
from pipelines.openmp import spin_briefly
from pipelines.telemetry import reset_peak_rss, say
from pipelines.worker_errors import WorkerError

Task = dict[str, Any]
Row = dict[str, Any]
Worker = Callable[[Task], Row]

PATIENCE_SECONDS = 30.0
"""How long a pool waits for its first actors before it says what it waits for."""
RELEASE_SECONDS = 30.0
"""How long an actor that finds no task left is kept where others may wait for its room."""
POLL_SECONDS = 5.0
"""How often a pool that waits looks around."""
_STARTING = ""
"""Deaths of actors that had no task yet are counted under this name, until one starts."""


@dataclass(frozen=True)
class ActorSize:
    """What each actor of a pool reserves."""

    num_cpus: float
    num_gpus: float = 0.0


class Pool:
    """Actors of one size. Each runs one kind of worker at a time, made at its first task of a run."""

    def __init__(self, size: ActorSize) -> None:
        self.size = size
        self._actors: list[Any] = []
        self._session: object = None

    def run(
        self,
        worker_cls: Callable[..., Worker],
        worker_kwargs: Mapping[str, Any],
        tasks: Iterable[Task],
        *,
        num_actors: int,
        min_actors: int = 1,
        max_retries: int = 3,
        release_idle: bool = False,
    ) -> Iterator[Row]:
        """Rows of `worker_cls(**worker_kwargs)(task)`, as they come, in no particular order.

        Tasks and rows are plain JSON data (a tuple arrives as a list); a task is asked for when an actor
        is free for it. Work begins once `min_actors` actors have started. Up to `num_actors` work, one
        task each at a time: those that find no room wait for it, which is what makes a cluster's
        autoscaler add nodes. An actor that dies (killed, out of memory, its node lost) is replaced and
        its task is given out again, up to `max_retries` times. What a worker raises is raised here as
        it is, at once. The actors stay for the next run, unless this one fails or is closed early.
        release_idle: end those that have found no task left for a while. The caller is connected to Ray
        already.

        Raises DFlashError when a task outlives its retries, UserError when not even `min_actors` actors
        have room in the cluster.
        """
        tasks = iter(tasks)
        first = list(islice(tasks, num_actors))
        if not first:
            return
        self._begin()
        min_actors = min(min_actors, len(first))
        require_room(min_actors, num_cpus=self.size.num_cpus, num_gpus=self.size.num_gpus)
        try:
            actors = self._staffed(len(first))
            job = _job(worker_cls, worker_kwargs)
            run = _Run(self, job, chain(first, tasks), min_actors, max_retries, release_idle)
            yield from run.rows(actors)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors and give back what they reserved; the next run starts others."""
        actors, self._actors = self._actors, []
        if actors and self._session == _session():
            import ray

            for actor in actors:
                with suppress(Exception):  # it may be gone already
                    ray.kill(actor)

    def _begin(self) -> None:
        """Forget the actors of a Ray that has been left since."""
        session = _session()
        if session != self._session:
            self._actors, self._session = [], session

    def _staffed(self, num_actors: int) -> list[Any]:
        """`num_actors` actors, of which those that are new may still wait for room."""
        while len(self._actors) < num_actors:
            self._actors.append(_new_actor(self.size))
        return self._actors[:num_actors]

    def replace(self, dead: Any) -> Any:
        """A new actor in a dead one's place."""
        successor = _new_actor(self.size)
        self._actors.append(successor)
        self.release(dead)
        return successor

    def release(self, actor: Any) -> None:
        """End one actor and give back what it reserved, or the room that it waits for."""
        import ray

        self._actors = [other for other in self._actors if other is not actor]
        with suppress(Exception):  # unreachable is not dead
            ray.kill(actor)


class _Run:
    """The tasks of one `Pool.run`: which wait, and who is at which."""

    def __init__(
        self,
        pool: Pool,
        job: tuple[str, Any],
        tasks: Iterator[Task],
        min_actors: int,
        max_retries: int,
        release_idle: bool,
    ) -> None:
        self._pool, self._job, self._tasks = pool, job, tasks
        self._min_actors, self._max_retries, self._release_idle = min_actors, max_retries, release_idle
        self._returned: deque[Task] = deque()
        """Of actors that died: given out before others."""
        self._pending: dict[Any, tuple[Any, Task | None]] = {}
        """What an actor will answer: to a task, or that it runs."""
        self._idle: list[tuple[Any, float]] = []
        """Actors that run and have no task, and since when."""
        self._num_started = 0
        self._deaths: Counter[str] = Counter()

    def rows(self, actors: list[Any]) -> Iterator[Row]:
        for actor in actors:
            self._greet(actor)
        while self._unfinished():
            actor, task, answer = self._next_answer()
            self._idle.append((actor, time.monotonic()))
            if task is None:
                self._num_started += 1
                self._deaths.pop(_STARTING, None)
            self._give_out()
            if task is not None:
                yield _row(json.loads(answer))

    def _unfinished(self) -> bool:
        if self._returned or self._num_started < self._min_actors:
            return True
        return any(task is not None for _, task in self._pending.values())

    def _greet(self, actor: Any) -> None:
        """An actor is given work once it says that it runs: one that waits for room would hold a task."""
        self._pending[actor.ready.remote()] = (actor, None)

    def _give_out(self) -> None:
        """A task for everybody who has none, as long as there are any."""
        while self._idle and self._num_started >= self._min_actors:
            task = self._returned.popleft() if self._returned else next(self._tasks, None)
            if task is None:
                self._stand_down()
                return
            actor, _ = self._idle.pop()
            self._pending[actor.work.remote(*self._job, json.dumps(task))] = (actor, task)

    def _stand_down(self) -> None:
        """No task is left: let go who still waits for room, and who has been idle for a while.

        Not at once: the next stage begins within seconds, and would have to load the target again.
        """
        if not self._release_idle:
            return
        for reference, (actor, task) in list(self._pending.items()):
            if task is None:
                del self._pending[reference]
                self._pool.release(actor)
        now = time.monotonic()
        for actor, since in self._idle:
            if now - since >= RELEASE_SECONDS:
                self._pool.release(actor)
        self._idle = [(actor, since) for actor, since in self._idle if now - since < RELEASE_SECONDS]

    def _next_answer(self) -> tuple[Any, Task | None, Any]:
        """The next actor that is free, the task it was at, and what it says."""
        import ray
        from ray.exceptions import RayActorError, RayError

        while True:
            reference = self._wait()
            actor, task = self._pending.pop(reference)
            try:
                return actor, task, ray.get(reference)
            except RayActorError as error:
                self._bury(task, error)
                self._greet(self._pool.replace(actor))
                self._give_out()
            except RayError as error:
                raise DFlashError(f"Ray could not run a task ({_first_line(error)}); rerun") from error

    def _wait(self) -> Any:
        import ray

        began, told = time.monotonic(), False
        while True:
            done, _ = ray.wait(list(self._pending), num_returns=1, timeout=POLL_SECONDS)
            if done:
                return done[0]
            self._give_out()
            waiting = all(task is None for _, task in self._pending.values())
            if waiting and not told and time.monotonic() - began >= PATIENCE_SECONDS:
                size = self._pool.size
                say(
                    f"waiting for room in the cluster: each actor needs {size.num_cpus:g} CPUs and "
                    f"{size.num_gpus:g} GPUs, and others hold them"
                )
                told = True

    def _bury(self, task: Task | None, error: Exception) -> None:
        """Give a dead actor's task out again, unless it (or starting) has cost too many."""
        what = "as they started" if task is None else "over one task"
        name = _STARTING if task is None else json.dumps(task)
        self._deaths[name] += 1
        if self._deaths[name] > self._max_retries:
            raise DFlashError(
                f"a worker process died {self._deaths[name]} times {what} ({_first_line(error)}): "
                "most often memory ran out, so rerun with fewer --resources.actors or smaller batches"
            ) from error
        if task is not None:
            self._returned.append(task)


_kept: list[Pool] = []


def kept_pool(size: ActorSize) -> Pool:
    """This process's pool of actors of that size; a pool of another size is closed first."""
    if not _kept or _kept[0].size != size:
        release_actors()
        _kept.append(Pool(size))
    return _kept[0]


def release_actors() -> None:
    """End the kept pool's actors, so that others have their CPUs, GPUs and memory; harmless without one."""
    for pool in _kept:
        pool.close()
    _kept.clear()


class _Actor:
    """What runs in an actor's process: one worker, made at its first task.

    An exception is returned as a row, since Ray would wrap it in its own and print it; returning it
    keeps the class, the message and the one place where it is raised.
    """

    def __init__(self) -> None:
        spin_briefly()
        self._job = ""
        self._worker: Worker | None = None

    def ready(self) -> None:
        """Answered once the actor runs."""

    def work(self, job: str, maker: list[Any], text: str) -> str:
        """A task of `job`, whose worker `maker` (a reference in a list) tells how to make."""
        try:
            if self._worker is None or self._job != job:
                self._worker = self._make(maker[0])
                self._job = job
            return json.dumps({"row": self._worker(json.loads(text))})
        except Exception as error:  # noqa: BLE001 - carried to the driver, whatever it is
            return json.dumps({"error": WorkerError.of(error).packed})

    def _make(self, maker: Any) -> Worker:
        """The new worker, after the old one and what it held are gone."""
        import gc

        import ray

        self._worker = None
        gc.collect()
        reset_peak_rss()
        worker_cls, worker_kwargs = ray.get(maker)
        worker: Worker = worker_cls(**worker_kwargs)
        return worker


def _new_actor(size: ActorSize) -> Any:
    import ray

    # Deaths are made up for by `Pool`: a restart would wait for room while other actors are free.
    options = {"num_cpus": size.num_cpus, "num_gpus": size.num_gpus, "max_restarts": 0}
    return ray.remote(_Actor).options(scheduling_strategy="SPREAD", **options).remote()


def _job(worker_cls: Callable[..., Worker], worker_kwargs: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """A run's name, and its worker's class and arguments put where every actor finds them."""
    import ray

    return uuid4().hex, [ray.put((worker_cls, dict(worker_kwargs)))]


def _session() -> object:
    import ray

    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()


def _row(answer: dict[str, Any]) -> Row:
    if "error" in answer:
        raise WorkerError(answer["error"]).original()
    row: Row = answer["row"]
    return row


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".:")
