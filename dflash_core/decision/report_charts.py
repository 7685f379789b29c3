"""Charts as inline SVG, drawn from numbers: no script, no outside file, every text escaped.

Colors are classes that the page's style sheet fills in, so that a chart follows light, dark and print.
The coordinates are SVG's: x to the right, y downwards, in pixels of the view box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from dflash_core.types import Interval

_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 14, 44


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    kind: str
    """"candidate" or "champion": its class."""
    values: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """A prompt, measured with both drafters."""

    label: str
    champion: float
    candidate: float


@dataclass(frozen=True)
class _Axis:
    """Values from `first` to `last` mapped to pixels from `start` to `end`."""

    first: float
    last: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.first) / (self.last - self.first)
        return round(self.start + share * (self.end - self.start), 1)


def position_chart(series: Sequence[Series], description: str) -> Markup:
    """Acceptance by position: k from 1 to the right, share of rounds from 0 to 100 % upwards."""
    longest = max(len(one.values) for one in series)
    x = _Axis(1, max(2, longest), _LEFT + 12, _WIDTH - _RIGHT - 8)
    y = _Axis(0, 1, _HEIGHT - _BOTTOM, _TOP)
    step = math.ceil(longest / 16)
    parts = [_horizontal(y.at(share), f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    parts += [_tick(x.at(k), str(k)) for k in range(1, longest + 1, step)]
    parts.append(_x_title("first k drafts all accepted"))
    for one in series:
        spots = [(x.at(k), y.at(share)) for k, share in enumerate(one.values, 1)]
        points = " ".join(f"{px},{py}" for px, py in spots)
        parts.append(Markup('<polyline class="line {}" points="{}"/>').format(one.kind, points))
        parts += [
            Markup(
                '<circle class="dot {}" cx="{}" cy="{}" r="3.5"><title>k = {}: {}</title></circle>'
            ).format(one.kind, px, py, k, f"{share:.1%}")
            for k, ((px, py), share) in enumerate(zip(spots, one.values, strict=True), 1)
        ]
    return _svg(parts, description)


def scatter(points: Sequence[Point], description: str) -> Markup:
    """τ of each prompt: with the champion to the right, with the new drafter upwards."""
    top = _round_up(max(max(p.champion, p.candidate) for p in points))
    x = _Axis(1, top, _LEFT + 4, _WIDTH - _RIGHT)
    y = _Axis(1, top, _HEIGHT - _BOTTOM, _TOP)
    ticks = _tau_ticks(top)
    parts = [_horizontal(y.at(value), f"{value:g}") for value in ticks]
    parts += [_tick(x.at(value), f"{value:g}") for value in ticks]
    parts.append(_x_title("τ with the champion"))
    parts.append(
        Markup('<line class="equal" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(
            x.at(1), y.at(1), x.at(top), y.at(top)
        )
    )
    parts += [
        Markup(
            '<circle class="prompt candidate" cx="{}" cy="{}" r="4"><title>{}: {} → {}</title></circle>'
        ).format(x.at(p.champion), y.at(p.candidate), p.label, f"{p.champion:.2f}", f"{p.candidate:.2f}")
        for p in points
    ]
    return _svg(parts, description)


def histogram(values: Sequence[float], kind: str, description: str) -> Markup:
    """How many prompts have which τ."""
    top = _round_up(max(values))
    num_bins = 16
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, int((value - 1) / (top - 1) * num_bins))] += 1
    highest = max(counts)
    x = _Axis(0, num_bins, _LEFT + 4, _WIDTH - _RIGHT)
    y = _Axis(0, highest, _HEIGHT - _BOTTOM, _TOP)
    step = max(1, math.ceil(highest / 5))
    parts = [_horizontal(y.at(count), str(count)) for count in range(0, highest + 1, step)]
    tau = _Axis(1, top, x.start, x.end)
    parts += [_tick(tau.at(value), f"{value:g}") for value in _tau_ticks(top)]
    parts.append(_x_title("τ of a prompt"))
    for i, count in enumerate(counts):
        low, high = (1 + (top - 1) * edge / num_bins for edge in (i, i + 1))
        parts.append(
            Markup(
                '<rect class="bar {}" x="{}" y="{}" width="{}" height="{}">'
                "<title>τ from {} to {}: {} prompts</title></rect>"
            ).format(
                kind,
                x.at(i) + 1,
                y.at(count),
                round(x.at(i + 1) - x.at(i) - 2, 1),
                round(y.at(0) - y.at(count), 1),
                f"{low:.2f}",
                f"{high:.2f}",
                count,
            )
        )
    return _svg(parts, description)


def interval_strip(
    interval: Interval, threshold: float | None, kind: str, ends: tuple[float, float], description: str
) -> Markup:
    """An interval on a line from `ends[0]` to `ends[1]`, as wide as its place, with a mark at `threshold`."""
    parts = [_RAIL]
    if threshold is not None:
        parts.append(
            Markup('<line class="threshold" x1="{0}" x2="{0}" y1="1" y2="23"/>').format(
                _percent(threshold, ends)
            )
        )
    parts.append(
        Markup('<line class="interval {}" x1="{}" x2="{}" y1="12" y2="12"/>').format(
            kind, _percent(interval.low, ends), _percent(interval.high, ends)
        )
    )
    parts.append(
        Markup('<circle class="dot {}" cx="{}" cy="12" r="5"/>').format(
            kind, _percent(interval.estimate, ends)
        )
    )
    return Markup('<svg class="strip" role="img" aria-label="{}" height="24">{}</svg>').format(
        description, Markup("").join(parts)
    )


def dot_strip(dots: Mapping[str, float], ends: tuple[float, float]) -> Markup:
    """Values by kind on a line from `ends[0]` to `ends[1]`. Only for the eye: the numbers stand beside it."""
    places = {kind: _percent(value, ends) for kind, value in dots.items()}
    parts = [_RAIL]
    if len(places) == 2:
        parts.append(
            Markup('<line class="between" x1="{}" x2="{}" y1="12" y2="12"/>').format(*places.values())
        )
    parts += [
        Markup('<circle class="dot {}" cx="{}" cy="12" r="5.5"/>').format(kind, place)
        for kind, place in reversed(places.items())
    ]
    return Markup('<svg class="strip" aria-hidden="true" height="24">{}</svg>').format(Markup("").join(parts))


_RAIL = Markup('<line class="rail" x1="2%" x2="98%" y1="12" y2="12"/>')


def _percent(value: float, ends: tuple[float, float]) -> str:
    """A place on a strip, kept off its two ends so that a dot is never cut."""
    share = (min(max(value, ends[0]), ends[1]) - ends[0]) / (ends[1] - ends[0])
    return f"{2 + 96 * share:.2f}%"


def _svg(parts: Sequence[Markup], description: str) -> Markup:
    return Markup('<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>').format(
        description, _WIDTH, _HEIGHT, Markup("").join(parts)
    )


def _horizontal(y: float, label: str) -> Markup:
    return Markup(
        '<line class="grid" x1="{0}" x2="{1}" y1="{2}" y2="{2}"/>'
        '<text class="tick" x="{3}" y="{4}" text-anchor="end">{5}</text>'
    ).format(_LEFT, _WIDTH - _RIGHT, y, _LEFT - 8, y + 4, label)


def _tick(x: float, label: str) -> Markup:
    return Markup('<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>').format(
        x, _HEIGHT - _BOTTOM + 18, label
    )


def _x_title(text: str) -> Markup:
    return Markup('<text class="axis" x="{}" y="{}" text-anchor="middle">{}</text>').format(
        (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, text
    )


def _round_up(highest: float) -> float:
    """The end of a τ axis: the next half, and never the axis' own beginning."""
    return max(1.5, math.ceil(highest * 2) / 2)


def _tau_ticks(top: float) -> list[float]:
    step = next(s for s in (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128) if (top - 1) / s <= 7)
    return [1 + step * i for i in range(int((top - 1) / step + 1e-9) + 1)]
