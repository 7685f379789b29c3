"""What the page shows row by row: the drafters measured, their numbers by prompt and domain, the stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_core.decision import report_charts as charts
from dflash_core.decision.report import RealignReport
from dflash_core.decoding.acceptance import by_domain, prompt_tau
from dflash_core.types import AcceptanceReport, Interval


@dataclass(frozen=True)
class Measured:
    """A drafter with its numbers, as the page calls and colors it."""

    kind: str
    title: str
    acceptance: AcceptanceReport
    interval: Interval


def measured_of(report: RealignReport) -> list[Measured]:
    """The new drafter first; where nothing was trained, the decision is about the champion."""
    found = []
    if report.candidate is not None:
        found.append(Measured("candidate", "New drafter", report.candidate, report.decision.tau_candidate))
    if report.champion is not None:
        of_champion = report.decision.tau_champion if found else report.decision.tau_candidate
        assert of_champion is not None
        title = "Champion so far" if found else "Champion"
        found.append(Measured("champion", title, report.champion, of_champion))
    return found


def pairs(measured: list[Measured]) -> list[charts.Point]:
    """Prompts that both drafters took rounds on."""
    if len(measured) < 2:
        return []
    others = {p.id: prompt_tau(p) for p in measured[1].acceptance.prompts}
    return [
        charts.Point(f"{p.id} ({p.domain})", before, now)
        for p in measured[0].acceptance.prompts
        if (now := prompt_tau(p)) is not None and (before := others.get(p.id)) is not None
    ]


def prompt_caption(measured: list[Measured]) -> str:
    """What the chart of the prompts shows, in a sentence."""
    if points := pairs(measured):
        better = sum(p.candidate > p.champion for p in points)
        worse = sum(p.candidate < p.champion for p in points)
        same = len(points) - better - worse
        stayed = f" and {same} stayed as they were" if same else ""
        return f"Of {len(points)} prompts, {better} got better, {worse} got worse{stayed}."
    values = sorted(
        v for one in measured[:1] for p in one.acceptance.prompts if (v := prompt_tau(p)) is not None
    )
    if not values:
        return "No prompt took a verify round."
    middle = values[(len(values) - 1) // 2]
    return f"From {values[0]:.2f} to {values[-1]:.2f}, half of the prompts at or below {middle:.2f}."


def domain_rows(measured: list[Measured]) -> list[dict[str, Any]]:
    """A row a domain, in order of name, with a strip of all drafters on one axis."""
    columns = [by_domain(one.acceptance) for one in measured]
    names = sorted({name for column in columns for name in column})
    end = max([2.0, *(1.05 * d.tau for column in columns for d in column.values() if d.tau is not None)])
    rows = []
    for name in names:
        found = [column.get(name) for column in columns]
        taus = [domain.tau if domain else None for domain in found]
        counts = [domain.prompts for domain in found if domain]
        dots = {one.kind: value for one, value in zip(measured, taus, strict=True) if value is not None}
        strip = charts.dot_strip(dots, (1.0, end)) if dots else None
        rows.append({"name": name, "prompts": counts[0], "taus": taus, "ratio": _ratio(taus), "strip": strip})
    return rows


def prompt_rows(measured: list[Measured]) -> list[dict[str, Any]]:
    """A row a prompt, the lowest τ first: that is where to look."""
    if not measured:
        return []
    others = [{p.id: prompt_tau(p) for p in one.acceptance.prompts} for one in measured]
    rows = []
    for p in measured[0].acceptance.prompts:
        taus = [column.get(p.id) for column in others]
        rows.append({"id": p.id, "domain": p.domain, "taus": taus, "ratio": _ratio(taus)})
    return sorted(rows, key=lambda row: (row["taus"][0] is None, row["taus"][0] or 0, row["id"]))


def stage_rows(report: RealignReport) -> list[Mapping[str, Any]]:
    """A row a stage, in the order they ran; `share` is that of the longest, in percent."""
    longest = max((seconds for _, _, seconds, _ in report.stages), default=0.0)
    return [
        {
            "name": name,
            "identity": identity,
            "seconds": seconds,
            "cached": cached,
            "share": 100 * seconds / longest if longest > 0 and not cached else 0.0,
        }
        for name, identity, seconds, cached in report.stages
    ]


def _ratio(taus: list[float | None]) -> float | None:
    if len(taus) < 2 or taus[0] is None or taus[1] is None:
        return None
    return taus[0] / taus[1]
