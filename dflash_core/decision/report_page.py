"""`report.html`: a `RealignReport` as one page that needs nothing else. Markup is in the template."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dflash_core.decision import report_charts as charts
from dflash_core.decision.gate import one_sentence
from dflash_core.decision.gate_checks import ACCEPTANCE_FLOOR, NOT_WORSE, PROMISE_KEPT, PROMISE_KEPT_PAIRED
from dflash_core.decision.report import RealignReport
from dflash_core.decision.report_rows import (
    Measured,
    domain_rows,
    measured_of,
    pairs,
    prompt_caption,
    prompt_rows,
    stage_rows,
)
from dflash_core.decoding.acceptance import (
    acceptance_by_position,
    acceptance_rate,
    lossless,
    prompt_tau,
    tau,
    tokens_per_second,
)
from dflash_core.fingerprint import SHORT
from dflash_core.types import GateCheck, Interval, Outcome, Verdict

_MAX_PROMPT_ROWS = 100
_HEADLINES = {
    Outcome.PROMOTED: (
        "Promoted",
        "The new drafter passed every check: it is promoted to serve this target.",
    ),
    Outcome.CERTIFIED: (
        "Certified",
        "The drafter that serves already fits this target; nothing was trained.",
    ),
    Outcome.REJECTED: ("Rejected", "The new drafter did not pass; whatever served before goes on serving."),
    Outcome.HELD: ("Held", "The measurements do not settle it: a person has to decide."),
}
_TONES = {
    Outcome.PROMOTED: Verdict.PASS,
    Outcome.CERTIFIED: Verdict.PASS,
    Outcome.REJECTED: Verdict.FAIL,
    Outcome.HELD: Verdict.INCONCLUSIVE,
}
_SIGNS = {Verdict.PASS: "✓", Verdict.FAIL: "✕", Verdict.INCONCLUSIVE: "?"}


def render(report: RealignReport) -> str:
    """The page's HTML. Every value is escaped: what a prompt file says is text, never markup."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": _duration,
        "moment": _moment,
        "number": _number,
        "percent": _percent,
        "sentence": _sentence,
        "times": _times,
    }
    headline, meaning = _HEADLINES[report.outcome]
    measured = measured_of(report)
    prompts = prompt_rows(measured)
    top = _top(report, measured)
    return environment.get_template("report.html.j2").render(
        report=report,
        headline=headline,
        meaning=meaning,
        reason=one_sentence(report.decision),
        tone=_TONES[report.outcome].value,
        sign=_SIGNS[_TONES[report.outcome]],
        short=SHORT,
        confidence=f"{report.decision.confidence * 100:g}%",
        decoding=_decoding(measured),
        ratio=_ratio_card(report),
        promise=next((c for c in report.decision.checks if c.name == PROMISE_KEPT), None),
        cards=[_card(one, report, top) for one in measured],
        checks=[_check(check) for check in report.decision.checks],
        not_certified=[_check(check) for check in report.not_certified.checks]
        if report.not_certified
        else [],
        measured=measured,
        curves=[acceptance_by_position(one.acceptance) for one in measured],
        position_chart=_position_chart(measured),
        prompt_chart=_prompt_chart(measured),
        prompt_caption=prompt_caption(measured),
        domains=domain_rows(measured),
        prompts=prompts[:_MAX_PROMPT_ROWS],
        num_prompts=len(prompts),
        stages=stage_rows(report),
        stage_total=sum(seconds for _, _, seconds, _ in report.stages),
    )


def _top(report: RealignReport, measured: list[Measured]) -> float:
    """Where the common axis of the cards ends."""
    thresholds = [c.threshold for c in report.decision.checks if c.threshold is not None]
    highs = [one.interval.high for one in measured]
    return max([2.0, *(value * 1.08 for value in highs + thresholds)])


def _card(one: Measured, report: RealignReport, top: float) -> dict[str, Any]:
    acceptance = one.acceptance
    mean = tau(acceptance)
    card: dict[str, Any] = {
        "kind": one.kind,
        "title": one.title,
        "tau": mean,
        "interval": one.interval,
        "strip": None,
        "rate": None,
        "speed": tokens_per_second(acceptance),
        "tokens": acceptance.tokens,
        "rounds": acceptance.rounds,
        "block_size": acceptance.block_size,
        "lossless": lossless(acceptance),
    }
    if mean is not None:
        floor = next((c.threshold for c in report.decision.checks if c.name == ACCEPTANCE_FLOOR), None)
        words = f"τ {_show(one.interval)}" + (f", floor {floor:.2f}" if floor is not None else "")
        card["strip"] = charts.interval_strip(one.interval, floor, one.kind, (1.0, top), words)
        card["floor"] = floor
        if acceptance.block_size > 1:
            card["rate"] = acceptance_rate(mean, acceptance.block_size)
    return card


def _ratio_card(report: RealignReport) -> dict[str, Any] | None:
    wanted = (NOT_WORSE, PROMISE_KEPT_PAIRED)
    check = next((c for c in report.decision.checks if c.name in wanted), None)
    if check is None or check.interval is None or check.threshold is None:
        return None
    against_itself = check.name == PROMISE_KEPT_PAIRED
    ends = (min(0.9, check.interval.low * 0.95), max(1.1, check.interval.high * 1.05))
    words = f"{_show(check.interval)} times, at least {check.threshold:.3g} allowed"
    strip = charts.interval_strip(check.interval, check.threshold, "ratio", ends, words)
    return {
        "title": "Now over its promotion" if against_itself else "New over champion",
        "decoded": "The drafter decoded the same {} prompts on both targets"
        if against_itself
        else "Both drafters decoded the same {} prompts",
        "interval": check.interval,
        "least": check.threshold,
        "strip": strip,
    }


def _check(check: GateCheck) -> dict[str, Any]:
    strip = Markup("")
    if check.interval is not None and check.threshold is not None:
        low, high = min(check.interval.low, check.threshold), max(check.interval.high, check.threshold)
        margin = 0.12 * (high - low) or 0.5
        words = f"{_show(check.interval)}, threshold {check.threshold:.3g}"
        strip = charts.interval_strip(
            check.interval, check.threshold, check.verdict.value, (low - margin, high + margin), words
        )
    return {"check": check, "sign": _SIGNS[check.verdict], "strip": strip}


def _position_chart(measured: list[Measured]) -> Markup | None:
    series = [charts.Series(one.kind, acceptance_by_position(one.acceptance)) for one in measured]
    series = [one for one in series if one.values]
    if not series:
        return None
    first = ", ".join(
        f"{one.title}: {_percent(acceptance_by_position(one.acceptance)[0])} of rounds accept the first draft"
        for one in measured
        if one.acceptance.rounds
    )
    return charts.position_chart(
        series, f"Acceptance by position. {first}. All numbers are in the table below."
    )


def _prompt_chart(measured: list[Measured]) -> Markup | None:
    if points := pairs(measured):
        return charts.scatter(points, f"τ of every prompt with both drafters. {prompt_caption(measured)}")
    for one in measured:
        if values := [value for p in one.acceptance.prompts if (value := prompt_tau(p)) is not None]:
            return charts.histogram(
                values, one.kind, f"How many prompts have which τ. {prompt_caption(measured)}"
            )
    return None


def _decoding(measured: list[Measured]) -> str:
    if not measured:
        return "nothing was decoded"
    acceptance = measured[0].acceptance
    sampling = "greedily" if acceptance.temperature == 0 else f"at temperature {acceptance.temperature:g}"
    return f"{sampling}, with at most {acceptance.max_new_tokens} new tokens an answer"


def _show(interval: Interval) -> str:
    return f"{interval.estimate:.2f}, between {interval.low:.2f} and {interval.high:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _moment(created_at: str) -> str:
    """An ISO 8601 moment as `2026-11-20 03:12 UTC`."""
    moment = datetime.fromisoformat(created_at).astimezone(UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
