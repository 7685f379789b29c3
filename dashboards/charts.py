"""Where things stand in the charts: plain numbers, which the templates draw as SVG.

Text goes into the drawing by way of the templates only, so that it is escaped like everything else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.model import Decision
from dflash_core.types import Interval

_LETTER = 7.0
"""Width of a letter of the axis labels, in the drawing's units."""


@dataclass(frozen=True)
class Frame:
    """Size of a drawing, and the margins around what is plotted."""

    width: float
    height: float
    left: float = 10
    right: float = 40
    top: float = 46
    bottom: float = 44

    @property
    def floor(self) -> float:
        return self.height - self.bottom

    @property
    def end(self) -> float:
        return self.width - self.right


COMPACT = Frame(680, 300)
WIDE = Frame(1060, 340)
SMALL = Frame(520, 270, left=58, right=16, top=16)
NUM_COMPACT, NUM_WIDE = 10, 20
"""How many checkpoints fit."""


@dataclass(frozen=True)
class Tick:
    """A label on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Mark:
    """One measured τ: a point with its interval."""

    x: float
    y: float
    low_y: float
    high_y: float
    kind: str
    """`before` for the drafter that served until then, else the outcome of the decision."""
    tau: Interval
    decision: Decision
    flag: str
    """`v3` over a promotion, else empty."""


@dataclass(frozen=True)
class TauChart:
    """τ over the checkpoints of a target, oldest first."""

    frame: Frame
    y_ticks: tuple[Tick, ...]
    names: tuple[Tick, ...]
    dates: tuple[Tick, ...]
    marks: tuple[Mark, ...]
    line: str
    """SVG path through what serves: how well it fits each new checkpoint, then what was done about it."""
    area: str


def tau_chart(decisions: Sequence[Decision], frame: Frame, limit: int) -> TauChart | None:
    """`decisions` as MLflow lists them, newest first; None if no τ was measured."""
    shown = [d for d in reversed(decisions[:limit]) if d.champion or d.candidate]
    if not shown:
        return None
    top = max(tau.high for d in shown for tau in (d.champion, d.candidate) if tau)
    ticks = _ticks(1.0, max(top, 2.0))
    slot = (frame.end - frame.left) / len(shown)
    offset = min(slot * 0.2, 18)

    def height(tau: float) -> float:
        share = (max(tau, ticks[0]) - ticks[0]) / (ticks[-1] - ticks[0])
        return round(frame.floor - share * (frame.floor - frame.top), 1)

    marks: list[Mark] = []
    served: list[tuple[float, float]] = []
    names, dates = [], []
    for i, decision in enumerate(shown):
        middle = frame.left + (i + 0.5) * slot
        names.append(Tick(round(middle, 1), _shorten(decision.target_name, slot)))
        dates.append(Tick(round(middle, 1), f"{decision.at:%d %b}"))
        for tau, kind, shift in _measured(decision, offset):
            mark = Mark(
                x=round(middle + shift, 1),
                y=height(tau.estimate),
                low_y=height(tau.low),
                high_y=height(tau.high),
                kind=kind,
                tau=tau,
                decision=decision,
                flag=f"v{decision.drafter_version}"
                if kind == "promoted" and decision.drafter_version
                else "",
            )
            marks.append(mark)
            if tau is decision.serves or tau is decision.champion:
                served.append((mark.x, mark.y))
    line = _path(served)
    area = f"{line} L{served[-1][0]} {frame.floor} L{served[0][0]} {frame.floor} Z" if len(served) > 1 else ""
    y_ticks = tuple(Tick(height(tick), f"{tick:g}") for tick in ticks)
    return TauChart(frame, y_ticks, tuple(names), tuple(dates), tuple(marks), line, area)


def _measured(decision: Decision, offset: float) -> list[tuple[Interval, str, float]]:
    """What the decision measured: τ, the kind of its mark, and how far from the middle it stands."""
    if decision.champion and decision.candidate:
        return [(decision.champion, "before", -offset), (decision.candidate, decision.outcome, offset)]
    return [(tau, decision.outcome, 0.0) for tau in (decision.champion, decision.candidate) if tau]


@dataclass(frozen=True)
class Curve:
    """Acceptance by position of one drafter."""

    name: str
    path: str
    points: tuple[tuple[float, float, str], ...]
    """x, y, and the point in words."""


@dataclass(frozen=True)
class PositionChart:
    """Share of rounds in which the first k draft tokens were all accepted, over k."""

    frame: Frame
    y_ticks: tuple[Tick, ...]
    x_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]


def position_chart(curves: dict[str, list[float]], frame: Frame) -> PositionChart | None:
    """`curves`: name -> acceptance rate at positions 1, 2, …; None if all are empty."""
    longest = max((len(values) for values in curves.values()), default=0)
    if longest == 0:
        return None
    step = (frame.end - frame.left) / max(longest - 1, 1)

    def place(k: int, rate: float) -> tuple[float, float, str]:
        share = min(max(rate, 0.0), 1.0) if math.isfinite(rate) else 0.0
        y = frame.floor - share * (frame.floor - frame.top)
        return round(frame.left + k * step, 1), round(y, 1), f"position {k + 1}: {share:.1%}"

    drawn = []
    for name, values in curves.items():
        points = tuple(place(k, rate) for k, rate in enumerate(values))
        drawn.append(Curve(name, _path([(x, y) for x, y, _ in points]), points))
    every = math.ceil(longest / 16)
    return PositionChart(
        frame=frame,
        y_ticks=tuple(Tick(place(0, share / 4)[1], f"{share * 25} %") for share in range(5)),
        x_ticks=tuple(Tick(place(k, 0)[0], str(k + 1)) for k in range(0, longest, every)),
        curves=tuple(drawn),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to at least `high`, six of them at most."""
    step = next(s for s in _steps() if low + 5 * s >= high)
    return [low + i * step for i in range(math.ceil((high - low) / step - 1e-9) + 1)]


def _steps() -> list[float]:
    return [base * 10.0**power for power in range(-1, 6) for base in (1, 2, 5)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y) in enumerate(points))


def _shorten(name: str, width: float) -> str:
    """The end of a checkpoint's name is what tells it from its siblings."""
    room = max(int((width - 8) / _LETTER), 4)
    return name if len(name) <= room else "…" + name[-(room - 1) :]
