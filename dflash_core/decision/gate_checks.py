"""The questions that the gate asks, one function each: numbers in, a `GateCheck` in words and numbers out.

A number passes or fails only when its whole interval lies on one side of the threshold; across it, a
person decides. What was not measured fails.
"""

from __future__ import annotations

from dflash_core.decoding.acceptance import lossless
from dflash_core.decoding.statistics import pairing_problem
from dflash_core.fingerprint import SHORT
from dflash_core.types import AcceptanceReport, GateCheck, Interval, Verdict

ACCEPTANCE_FLOOR = "acceptance floor"
NOT_WORSE = "not worse than champion"
PROMISE_KEPT = "loss since promotion"
PROMISE_KEPT_PAIRED = "loss since promotion, prompt by prompt"
NOT_MEASURED = Interval(0.0, 0.0, 0.0)
"""τ of a report without a verify round: no real τ is below 1, and every threshold fails it."""


def num_measured(report: AcceptanceReport) -> int:
    """Prompts with a verify round: the others say nothing about τ."""
    return sum(1 for p in report.prompts if p.num_rounds)


def show(interval: Interval) -> str:
    """An interval for people."""
    if interval == NOT_MEASURED:
        return "not measured"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def enough_prompts(report: AcceptanceReport, least: int) -> GateCheck:
    """Too few prompts are inconclusive; none at all is a fail."""
    count, total = num_measured(report), len(report.prompts)
    if not count:
        verdict, why = Verdict.FAIL, "no prompt led to a single verify round, so nothing was measured"
    elif count < least:
        verdict, why = Verdict.INCONCLUSIVE, "too few prompts to tell the drafter from the luck of the draw"
    else:
        verdict, why = Verdict.PASS, "enough prompts to estimate how much τ varies between them"
    ended = f"; {total - count} of {total} ended at their first token" if count < total else ""
    return GateCheck("enough prompts", verdict, f"{count} prompts{ended}", f"at least {least}", why)


def all_lossless(reports: list[AcceptanceReport]) -> GateCheck:
    """Every output of every report was compared with the target's own, and equal."""
    prompts = [p for report in reports for p in report.prompts]
    equal = sum(p.lossless is True for p in prompts)
    verdict = Verdict.PASS if all(lossless(report) for report in reports) else Verdict.FAIL
    if any(p.lossless is False for p in prompts):
        why = "the output differs from what the target says alone, so these numbers cannot be trusted"
    elif verdict is Verdict.FAIL:
        why = "not every output was compared with the target's own, which only greedy decoding allows"
    else:
        why = "the output is token for token what the target says alone"
    measured = f"{equal} of {len(prompts)} outputs equal"
    return GateCheck("lossless", verdict, measured, "every output equal", why)


def floor(tau: Interval, least: float) -> GateCheck:
    """The threshold that the user set."""
    words = {
        Verdict.PASS: "even the low end of the interval reaches the floor",
        Verdict.FAIL: "even the high end of the interval stays below the floor",
        Verdict.INCONCLUSIVE: "the floor lies inside the interval, so more prompts are needed",
    }
    return _tau_check(ACCEPTANCE_FLOOR, tau, least, f"τ at least {least:.2f}", words)


def promise_kept(tau: Interval, promised: float, loss: float) -> GateCheck:
    """A champion on a new target against what it was promoted with."""
    least = (1 - loss) * promised
    words = {
        Verdict.PASS: "even the low end of the interval is within the allowed loss since its promotion",
        Verdict.FAIL: "the drafter has lost more on this target than it may, so it is realigned",
        Verdict.INCONCLUSIVE: "whether the drafter has lost more than it may is unclear, so it is realigned",
    }
    share = f"{1 - loss:.3g} times " if loss else ""
    required = f"τ at least {least:.2f}, {share}the {promised:.2f} of its promotion"
    return _tau_check(PROMISE_KEPT, tau, least, required, words)


def promise_kept_paired(ratio: Interval, loss: float) -> GateCheck:
    """A champion on a new target against itself at its promotion, on the same prompts."""
    least = 1 - loss
    verdict = _side(ratio, least)
    why = {
        Verdict.PASS: "on the same prompts, even the low end of the interval is within the allowed loss",
        Verdict.FAIL: "the drafter has lost more on this target than it may, so it is realigned",
        Verdict.INCONCLUSIVE: "whether the drafter has lost more than it may is unclear, so it is realigned",
    }[verdict]
    required = f"at least {least:.3g} times the τ of its promotion"
    return GateCheck(PROMISE_KEPT_PAIRED, verdict, f"{show(ratio)} times", required, why, ratio, least)


def decoding_problem(one: AcceptanceReport, other: AcceptanceReport) -> str | None:
    """Why two reports were not decoded alike; None if they were."""
    return None if _decoding(one) == _decoding(other) else "the decoding settings differ"


def not_worse(ratio: Interval | None, problem: str | None, loss: float) -> GateCheck:
    """A candidate against the champion; without a `ratio`, `problem` says why there is none."""
    least = 1 - loss
    required = f"at least {least:.3g} times the champion's τ"
    if ratio is None:
        why = f"the two cannot be compared: {problem or 'no verify round was measured'}"
        return GateCheck(NOT_WORSE, Verdict.FAIL, "not measured", required, why)
    verdict = _side(ratio, least)
    why = {
        Verdict.PASS: "on the same prompts, even the low end of the interval is within the allowed loss",
        Verdict.FAIL: "on the same prompts, even the high end of the interval loses more than is allowed",
        Verdict.INCONCLUSIVE: "the allowed loss lies inside the interval, so more prompts are needed",
    }[verdict]
    return GateCheck(NOT_WORSE, verdict, f"{show(ratio)} times", required, why, ratio, least)


def no_champion(loss: float) -> GateCheck:
    """Stands for `not_worse` at the first drafter of a family."""
    required = f"at least {1 - loss:.3g} times the champion's τ"
    why = "there is no drafter yet to be worse than"
    return GateCheck(NOT_WORSE, Verdict.PASS, "no champion", required, why)


def comparable(candidate: AcceptanceReport, champion: AcceptanceReport) -> list[GateCheck]:
    """Whether the two were measured on one target, on the same prompts, and decoded alike."""
    return [
        _same(
            "same target",
            candidate.target_fingerprint[:SHORT],
            champion.target_fingerprint[:SHORT],
            None if candidate.target_fingerprint == champion.target_fingerprint else "the targets differ",
        ),
        _same(
            "same prompts",
            f"{len(candidate.prompts)} prompts",
            f"{len(champion.prompts)} prompts",
            pairing_problem(candidate, champion),
        ),
        _same(
            "same decoding settings",
            _decoding(candidate),
            _decoding(champion),
            decoding_problem(candidate, champion),
        ),
    ]


def _same(name: str, ours: str, theirs: str, problem: str | None) -> GateCheck:
    verdict = Verdict.FAIL if problem else Verdict.PASS
    measured = ours if ours == theirs else f"{ours}; champion: {theirs}"
    return GateCheck(name, verdict, measured, "equal for both", problem or "both were measured alike")


def _decoding(report: AcceptanceReport) -> str:
    sampling = "greedy" if report.temperature == 0 else f"temperature {report.temperature!r}"
    return f"{sampling}, at most {report.max_new_tokens} new tokens"


def _tau_check(name: str, tau: Interval, least: float, required: str, words: dict[Verdict, str]) -> GateCheck:
    if tau == NOT_MEASURED:
        return GateCheck(name, Verdict.FAIL, "not measured", required, "nothing was measured")
    verdict = _side(tau, least)
    return GateCheck(name, verdict, f"τ {show(tau)}", required, words[verdict], tau, least)


def _side(interval: Interval, threshold: float) -> Verdict:
    """By the whole interval: above the threshold, below it, or across."""
    if interval.low >= threshold:
        return Verdict.PASS
    return Verdict.FAIL if interval.high < threshold else Verdict.INCONCLUSIVE
