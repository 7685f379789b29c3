"""Numbers, moments and outcomes as the pages spell them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from dflash_core.fingerprint import SHORT

OUTCOMES = {
    "promoted": "a new drafter took over",
    "certified": "the drafter still fits; nothing was trained",
    "rejected": "the gate refused the candidate",
    "held": "the gate could not decide; a person has to",
}


def ago(moment: datetime, now: datetime) -> str:
    """How long before `now`, in the largest unit that counts at least one."""
    seconds = max((now - moment).total_seconds(), 0.0)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return "just now"


def duration(seconds: float) -> str:
    """`8 s`, `3 min 12 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02} min"


def clock(moment: datetime | str) -> str:
    """A moment in UTC, to the minute; a text that is none is shown as it is."""
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment)
        except ValueError:
            return str(moment)
    return f"{moment.astimezone(UTC):%d %b %Y, %H:%M} UTC"


def short(fingerprint: str) -> str:
    """As much of a fingerprint as people read."""
    return fingerprint[:SHORT]


def two_digits(number: float) -> str:
    """τ as it is shown everywhere."""
    return f"{number:.2f}"


def path_segment(name: str) -> str:
    """A name as one part of a link's path."""
    return quote(name, safe="")


FILTERS: dict[str, Callable[..., Any]] = {
    "ago": ago,
    "clock": clock,
    "duration": duration,
    "path_segment": path_segment,
    "short": short,
    "two_digits": two_digits,
}
