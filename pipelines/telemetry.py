"""What a person sees while a job runs: progress of the long stages, one-line news, peak memory.

Everything goes to stderr; stdout belongs to results. On a terminal a stage is a bar; anywhere else it
is plain log lines, one at the start, one every few seconds, one at the end.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pipelines.metrics import StageMetrics
from pipelines.pace import Pace

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_INTERVAL_SECONDS = 10.0

Field = int | float | str


class Progress(Protocol):
    """A running stage's display."""

    def advance(self, count: int = 1, *, fresh: bool = True, **fields: Field) -> None:
        """`count` more units are done. An int field is a count and adds up; others show the latest.

        The counts `tokens` and `bytes` are metrics too, and `bytes` is shown in kB, MB and so on.
        fresh: done by this run, and not by an earlier one that it goes on from.
        """


@contextmanager
def progress(
    stage: str,
    total: int | None,
    unit: str,
    target: str = "",
    *,
    done: int = 0,
    log_interval_seconds: float = LOG_INTERVAL_SECONDS,
) -> Iterator[Progress]:
    """Show `stage` advancing towards `total` units, with rate and ETA, here and as Ray metrics.

    total: None when it is not known (no ETA then). target: the metrics' label. done: units finished by
    an earlier run, which count as done but not towards the rate.
    """
    metrics = StageMetrics(stage, total, unit, target, done)
    try:
        with _display(stage, total, unit, done, log_interval_seconds) as display:
            yield _Both(display, metrics)
    finally:
        metrics.end()


@contextmanager
def _display(
    stage: str, total: int | None, unit: str, done: int, log_interval_seconds: float
) -> Iterator[Progress]:
    if sys.stderr.isatty():
        with _bar(stage, total, unit, done) as bar:
            yield _Bar(bar)
        return
    log = _Log(stage, total, unit, done, log_interval_seconds)
    log.write("started")
    try:
        yield log
    except BaseException:
        log.write("stopped")
        raise
    log.write("finished")


def say(message: str) -> None:
    """One line of news, above a running bar on a terminal and timestamped anywhere else."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        tqdm.write(message, file=sys.stderr)
    else:
        print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def peak_rss_mb() -> float:
    """Peak resident memory of this process, in MB.

    On Linux from /proc, which starts anew with each program; `getrusage` would carry over the peak of
    whichever process started this one.
    """
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1024


def reset_peak_rss() -> None:
    """Let `peak_rss_mb` start anew from what is resident now, where the system allows it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _bar(stage: str, total: int | None, unit: str, done: int) -> tqdm:
    from tqdm import tqdm

    return tqdm(desc=stage, total=total, unit=f" {unit}", initial=done, file=sys.stderr, dynamic_ncols=True)


class _Both:
    """What people see and what Prometheus does."""

    def __init__(self, display: Progress, metrics: StageMetrics) -> None:
        self._display, self._metrics = display, metrics

    def advance(self, count: int = 1, *, fresh: bool = True, **fields: Field) -> None:
        self._display.advance(count, fresh=fresh, **fields)
        self._metrics.advance(count, fresh=fresh, fields=fields)


class _Fields:
    """The fields that a stage reports beside its count."""

    def __init__(self) -> None:
        self._values: dict[str, Field] = {}

    def update(self, fields: dict[str, Field]) -> None:
        for name, value in fields.items():
            before = self._values.get(name, 0)
            counts = isinstance(value, int) and isinstance(before, int)
            self._values[name] = before + value if counts else value  # type: ignore[operator]

    def texts(self) -> dict[str, str]:
        return {name: _field_text(name, value) for name, value in self._values.items()}


class _Bar:
    """A tqdm bar."""

    def __init__(self, bar: tqdm) -> None:
        self._bar, self._fields = bar, _Fields()

    def advance(self, count: int = 1, *, fresh: bool = True, **fields: Field) -> None:
        self._fields.update(fields)
        if not fresh:
            self._bar.initial += count
        self._bar.set_postfix(self._fields.texts(), refresh=False)
        self._bar.update(count)


class _Log:
    """Plain lines, for a log file or a job's output."""

    def __init__(self, stage: str, total: int | None, unit: str, done: int, interval_seconds: float) -> None:
        self._stage, self._unit = stage, unit
        self._pace = Pace(total, done)
        self._interval = interval_seconds
        self._fields = _Fields()
        self._written = time.monotonic()

    def advance(self, count: int = 1, *, fresh: bool = True, **fields: Field) -> None:
        self._fields.update(fields)
        self._pace.advance(count, fresh=fresh)
        if fresh and time.monotonic() - self._written >= self._interval:
            self.write()

    def write(self, event: str = "") -> None:
        self._written = time.monotonic()
        pace = self._pace
        total = "" if pace.total is None else f"/{pace.total:,}"
        parts = [f"{self._stage}: {event} {pace.done:,}{total} {self._unit}".replace(":  ", ": ")]
        if pace.rate is not None:
            parts.append(f"{_rate_text(pace.rate)} {self._unit}/s")
        if event in ("finished", "stopped"):
            parts.append(f"{_duration_text(pace.seconds)}")
        elif (left := pace.seconds_left) is not None:
            parts.append(f"ETA {_duration_text(left)}")
        parts += [f"{name} {text}" for name, text in self._fields.texts().items()]
        say(" · ".join(parts))


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def bytes_text(num_bytes: float) -> str:
    """`512 B`, `1.5 kB`, `2.3 GB`: powers of a thousand."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} PB"


def _field_text(name: str, value: Field) -> str:
    if name == "bytes" and not isinstance(value, str):
        return bytes_text(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def _duration_text(seconds: float) -> str:
    """`7s`, `2m05s`, `1h02m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole // 60 % 60:02d}m"
