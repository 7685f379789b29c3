"""`run_stage`: find a stage's output by what it depends on, or make it under a lease and commit it.

A stage is a pure function of its inputs, so its identity names its output. A rerun finds what is
committed; a killed run leaves no half-made output that anything would read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dflash_core.fingerprint import SHORT, fingerprint
from dflash_core.store.artifacts import Artifact, DamagedArtifactError, Lease, Store, Workspace
from dflash_core.store.attempt import Attempt
from dflash_core.store.storage_errors import explained
from dflash_core.store.store_contents import mark_used

Body = Callable[[Workspace], dict[str, Any]]


class EventKind(StrEnum):
    """What can happen to a stage."""

    CACHED = "cached"
    STARTED = "started"
    RESUMED = "resumed"
    TAKEN_OVER = "taken over"
    DAMAGED = "damaged"
    FINISHED = "finished"


@dataclass(frozen=True)
class StageEvent:
    """News of a stage, for whoever watches."""

    kind: EventKind
    stage: str
    identity: str
    message: str
    """One line for people."""


OnEvent = Callable[[StageEvent], None]


@dataclass(frozen=True)
class StageResult:
    """A stage's output and what it took."""

    name: str
    identity: str
    seconds: float
    """Wall time in this run, next to nothing when it was cached; `artifact.seconds` is the making's."""
    cached: bool
    artifact: Artifact


def stage_identity(name: str, inputs: dict[str, Any], code_version: int) -> str:
    """64 hex digits. Raises TypeError or ValueError for inputs that have no stable identity."""
    return fingerprint({"stage": name, "code": code_version, "inputs": inputs})


def run_stage(
    store: Store,
    name: str,
    inputs: dict[str, Any],
    body: Body,
    *,
    code_version: int,
    resumable: bool = False,
    on_event: OnEvent | None = None,
) -> StageResult:
    """The output of stage `name`, made by `body` unless the store has it.

    inputs: everything that the output depends on. code_version: to be raised when `body` changes what
    it makes of them. `body` puts files into the workspace and returns what it has to say about them, as
    JSON-able data. resumable: whether `body` can go on with files that a killed run had put; they are
    kept then, also after an error, and cleared otherwise.

    Raises LeaseHeldError while another live run makes the same output or if one took the work over,
    UserError if the store is full or cannot be written, and whatever `body` raises; nothing is
    committed then.
    """
    began = time.monotonic()
    identity = stage_identity(name, inputs, code_version)

    def tell(kind: EventKind, message: str) -> None:
        if on_event is not None:
            on_event(StageEvent(kind, name, identity, f"{name} {identity[:SHORT]}: {message}"))

    def result(artifact: Artifact, *, cached: bool) -> StageResult:
        return StageResult(name, identity, time.monotonic() - began, cached, artifact)

    with explained(store.location):
        artifact = store.artifact(name, identity)
        if artifact is None:
            with store.lease(f"{name}-{identity}") as lease:
                attempt = Attempt(store, lease, name, identity, resumable)
                # Another run may have finished it between the look and the lease.
                artifact = _look_again(attempt, tell)
                if artifact is None:
                    return result(_make(attempt, inputs, body, tell), cached=False)
    mark_used(store, name, identity)
    tell(EventKind.CACHED, f"found, made before in {artifact.seconds:.1f} s")
    return result(artifact, cached=True)


def _look_again(attempt: Attempt, tell: Callable[[EventKind, str], None]) -> Artifact | None:
    """The committed output; a damaged one is moved out of the way."""
    try:
        return attempt.store.committed(attempt.stage, attempt.identity)
    except DamagedArtifactError as error:
        aside = attempt.set_aside()
        tell(EventKind.DAMAGED, f"{str(error).partition(': ')[0]}; set aside as {aside}, made again")
        return None


def _make(
    attempt: Attempt, inputs: dict[str, Any], body: Body, tell: Callable[[EventKind, str], None]
) -> Artifact:
    began = time.monotonic()
    try:
        workspace, num_kept = attempt.begin(inputs)
        _tell_start(attempt.lease, num_kept, tell)
        meta = body(workspace)
        artifact = attempt.commit(workspace, inputs, meta, time.monotonic() - began)
    except BaseException:
        attempt.abandon()
        raise
    tell(EventKind.FINISHED, f"finished in {artifact.seconds:.1f} s")
    return artifact


def _tell_start(lease: Lease, num_kept: int, tell: Callable[[EventKind, str], None]) -> None:
    if lease.taken_over_from is not None:
        tell(EventKind.TAKEN_OVER, f"taken over from {lease.taken_over_from}, which is dead")
    if num_kept:
        tell(EventKind.RESUMED, f"resumed, {num_kept} files of an earlier run are kept")
    else:
        tell(EventKind.STARTED, "started")
