"""Where things stand in the charts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dashboards.charts import COMPACT, SMALL, position_chart, tau_chart
from dashboards.model import Decision
from dashboards.wording import ago, clock, duration
from dflash_core.types import Interval

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
FIRST = Decision(
    run_id="r",
    family="f",
    outcome="promoted",
    reason="",
    target_fingerprint="a" * 64,
    target_path="/models/a-checkpoint-with-a-long-name-step-000100",
    at=NOW,
    seconds=1.0,
    champion=None,
    candidate=Interval(4.0, 3.0, 5.0),
    champion_version="",
    drafter_version="1",
)
REJECTED = replace(
    FIRST, outcome="rejected", champion=Interval(2.0, 1.5, 2.5), candidate=Interval(0.5, 0.25, 1.0)
)


def test_oldest_first_and_the_line_follows_what_serves() -> None:
    chart = tau_chart([REJECTED, FIRST], COMPACT, 10)
    assert chart is not None
    first, before, rejected = chart.marks
    assert [mark.kind for mark in chart.marks] == ["promoted", "before", "rejected"]
    assert first.x < before.x < rejected.x
    assert first.high_y < first.y < first.low_y
    assert chart.line == f"M{first.x} {first.y} L{before.x} {before.y}"
    assert (first.flag, before.flag, rejected.flag) == ("v1", "", "")
    assert rejected.y == COMPACT.floor  # below 1 there is nothing to draw, and nothing falls off the chart
    assert [tick.text for tick in chart.y_ticks] == ["1", "2", "3", "4", "5"]
    assert all(COMPACT.top <= mark.high_y and mark.low_y <= COMPACT.floor for mark in chart.marks)


@pytest.mark.parametrize("tau", [1.0, 1.01, 1.9, 6.0, 15.9, 300.0])
def test_ticks_cover_any_tau_and_stay_few(tau: float) -> None:
    chart = tau_chart([replace(FIRST, candidate=Interval(tau, tau, tau))], COMPACT, 10)
    assert chart is not None
    assert 2 <= len(chart.y_ticks) <= 6
    assert float(chart.y_ticks[-1].text) >= tau
    assert COMPACT.top <= chart.marks[0].y <= COMPACT.floor


def test_only_the_newest_are_drawn_and_long_names_keep_their_end() -> None:
    decisions = [replace(FIRST, at=NOW - timedelta(days=i)) for i in range(30)]
    chart = tau_chart(decisions, COMPACT, 10)
    assert chart is not None
    assert len(chart.marks) == 10
    assert chart.dates[-1].text == "30 Nov"
    assert chart.names[0].text.startswith("…")
    assert chart.names[0].text.endswith("000100")


def test_without_measurements_there_is_no_chart() -> None:
    assert tau_chart([], COMPACT, 10) is None
    assert tau_chart([replace(FIRST, candidate=None)], COMPACT, 10) is None
    assert position_chart({}, SMALL) is None
    assert position_chart({"candidate": []}, SMALL) is None


def test_positions_run_from_certain_to_never() -> None:
    chart = position_chart({"candidate": [1.0, 0.5, 0.0], "champion": [float("nan")]}, SMALL)
    assert chart is not None
    assert [point[:2] for point in chart.curves[0].points] == [
        (SMALL.left, SMALL.top),
        ((SMALL.left + SMALL.end) / 2, (SMALL.top + SMALL.floor) / 2),
        (SMALL.end, SMALL.floor),
    ]
    assert [tick.text for tick in chart.x_ticks] == ["1", "2", "3"]
    assert len(position_chart({"candidate": [0.1] * 63}, SMALL).x_ticks) == 16  # type: ignore[union-attr]


def test_moments_and_durations_in_words() -> None:
    assert [ago(NOW - timedelta(seconds=s), NOW) for s in (-5, 59, 60, 7_199, 90_000)] == [
        "just now",
        "just now",
        "1 min ago",
        "1 h ago",
        "1 d ago",
    ]
    assert [duration(s) for s in (0.4, 59.6, 125, 7_500)] == ["0 s", "1 min 00 s", "2 min 05 s", "2 h 05 min"]
    assert clock("2026-11-30T13:00:00+01:00") == "30 Nov 2026, 12:00 UTC"
    assert clock("some day") == "some day"
