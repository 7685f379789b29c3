"""How fast a stage advances and when it will be done; time spent on starting up is left out."""

from __future__ import annotations

import time


class Pace:
    """Units done so far, by earlier runs and by this one, and when."""

    def __init__(self, total: int | None, done: int = 0) -> None:
        """total: None when it is not known. done: by an earlier run, not counted towards the rate."""
        self.total, self.done = total, done
        self._first = done
        self._began = time.monotonic()
        self._start: tuple[float, int] | None = None
        """When the first units were done, and how many: what came before was starting up."""

    def advance(self, count: int, *, fresh: bool) -> None:
        """`count` more are done, by this run if `fresh`."""
        self.done += count
        if not fresh:
            self._first += count
        elif self._start is None:
            self._start = time.monotonic(), self.done

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    @property
    def rate(self) -> float | None:
        """Units per second of this run; None before there are any."""
        fresh, seconds = self.done - self._first, self.seconds
        return fresh / seconds if fresh and seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """At the rate since the first units were done; None before there is one."""
        if self.total is None or self._start is None:
            return None
        began, done = self._start
        if self.done <= done:
            return None
        return (self.total - self.done) * (time.monotonic() - began) / (self.done - done)
