"""What Ray does to the process that uses it, and how it is kept in bounds: chatter, SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

DEBUG_VARIABLE = "DFLASH_DEBUG"
LOG_LEVEL_VARIABLE = "RAY_BACKEND_LOG_LEVEL"


def is_debug() -> bool:
    """Whether Ray's own logs and those of its workers are wanted (`DFLASH_DEBUG=1`)."""
    return os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


def set_environment() -> None:
    """Ray reads these as it starts; what the user set stays.

    Ray's core logs as errors what is none (an actor that was ended on purpose), so short of debugging
    its logs are off; what really fails arrives as an exception.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not is_debug():
        os.environ.setdefault(LOG_LEVEL_VARIABLE, "fatal")


def mute_raylet() -> None:
    """Keep Ray's messages about dead workers off stdout, where results go.

    Ray prints them there whatever `log_to_driver` says, and this flag of its debugger is the only
    way to stop it. A death that matters ends in an exception anyway.
    """
    if not is_debug():
        import ray._private.worker

        ray._private.worker._worker_logs_enabled = False  # noqa: SLF001


def verbosity() -> dict[str, Any]:
    """Arguments of `ray.init` about logging."""
    return {"log_to_driver": is_debug(), "logging_level": logging.INFO if is_debug() else logging.ERROR}


@contextmanager
def restrained() -> Iterator[None]:
    """Around `ray.init`: what it says to stderr comes afterwards, its SIGTERM handler goes."""
    with _own_sigterm(), _without_log_level_notice():
        yield


@contextmanager
def _without_log_level_notice() -> Iterator[None]:
    """Drop the one line in which Ray's core says on stderr that it obeys `RAY_BACKEND_LOG_LEVEL`."""
    with tempfile.TemporaryFile() as kept:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            kept.seek(0)
            os.write(2, b"".join(line for line in kept if LOG_LEVEL_VARIABLE.encode() not in line))


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Undo Ray's SIGTERM handler, which exits with code 15 and replaces the caller's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _terminate if before == signal.SIG_DFL else before)


def _terminate(signum: int, _frame: FrameType | None) -> NoReturn:
    """Unwind as for any exit, so that leases are let go and the local Ray ends."""
    raise SystemExit(128 + signum)
