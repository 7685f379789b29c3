"""Progress of stages as Ray metrics, which Ray exports to Prometheus on every node.

Prometheus finds them as `ray_dflash_stage_…`, each with the labels `stage`, `unit` and `target` (the head of
the target's fingerprint). Nothing is recorded, and Ray is not imported, until the process has joined a Ray.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipelines.pace import Pace

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge

PREFIX = "dflash_stage_"
LABELS = ("stage", "unit", "target")
COUNTERS = {
    "units": "Units (the label `unit`: prompts, samples, steps) done by this run",
    "tokens": "Tokens done by this run",
    "written_bytes": "Bytes written by this run",
}
GAUGES = {
    "done": "Units done, by earlier runs too",
    "size": "Units in all",
    "units_per_second": "Units per second of this run",
    "tokens_per_second": "Tokens per second of this run",
    "eta_seconds": "Seconds until the stage is done; 0 when it has ended",
}


class StageMetrics:
    """One stage's metrics."""

    def __init__(self, stage: str, total: int | None, unit: str, target: str, done: int) -> None:
        self._labels = {"stage": stage, "unit": unit, "target": target}
        self._pace = Pace(total, done)
        self._tokens = 0
        self._made: tuple[dict[str, Counter], dict[str, Gauge]] | None = None
        self._unsaid = dict.fromkeys(COUNTERS, 0)

    def advance(self, count: int, *, fresh: bool, fields: Mapping[str, object]) -> None:
        """As `Progress.advance`."""
        self._pace.advance(count, fresh=fresh)
        if fresh:
            tokens, written = (_whole(fields.get(name)) for name in ("tokens", "bytes"))
            self._tokens += tokens
            for name, more in zip(COUNTERS, (count, tokens, written), strict=True):
                self._unsaid[name] += more
        self._say(self._pace.seconds_left)

    def end(self) -> None:
        """The stage has ended, well or not: it has no rate any more."""
        self._say(0.0, ended=True)

    def _say(self, eta: float | None, *, ended: bool = False) -> None:
        if (made := self._metrics()) is None:
            return
        counters, gauges = made
        for name, more in self._unsaid.items():
            if more:
                counters[name].inc(more, self._labels)
                self._unsaid[name] = 0
        values = {
            "done": self._pace.done,
            "size": self._pace.total,
            "units_per_second": 0.0 if ended else self._pace.rate,
            "tokens_per_second": 0.0 if ended else self._tokens / max(self._pace.seconds, 1e-9),
            "eta_seconds": eta,
        }
        for name, value in values.items():
            if value is not None:
                gauges[name].set(value, self._labels)

    def _metrics(self) -> tuple[dict[str, Counter], dict[str, Gauge]] | None:
        """Ray's own objects, made once Ray is there; None until then."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return None
        if self._made is None:
            from ray.util.metrics import Counter, Gauge

            self._made = (
                {name: Counter(PREFIX + name, text, LABELS) for name, text in COUNTERS.items()},
                {name: Gauge(PREFIX + name, text, LABELS) for name, text in GAUGES.items()},
            )
        return self._made


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
