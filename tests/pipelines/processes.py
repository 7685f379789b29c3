"""Processes that a test looks for, waits for and cleans away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def processes_of(session: int) -> list[int]:
    """Processes of the session that `start_new_session` gave to a child; Ray's workers stay in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie doesn't)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for `condition`; fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def end_session(session: int) -> None:
    """Kill what a failed test left of a child's session."""
    for pid in processes_of(session):
        os.kill(pid, signal.SIGKILL)
