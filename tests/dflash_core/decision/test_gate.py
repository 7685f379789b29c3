"""The gate's three answers, each check on both sides of its threshold and across it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dflash_core.decision.gate import GatePolicy, decide, one_sentence, still_fits
from dflash_core.decoding.statistics import bootstrap_ratio, bootstrap_tau
from dflash_core.types import AcceptanceReport, GateDecision, Interval, Verdict
from tests.dflash_core.acceptance_samples import constant, drawn, drawn_pair, prompt, report

PASS, FAIL, INCONCLUSIVE = Verdict.PASS, Verdict.FAIL, Verdict.INCONCLUSIVE
POLICY = GatePolicy(min_tau=1.1, num_resamples=500)


def verdicts(decision: GateDecision) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in decision.checks}


def worse(champion: AcceptanceReport, every: int) -> AcceptanceReport:
    """The same prompts with one draft fewer accepted in each `every`-th round."""
    prompts = tuple(
        prompt(p.id, [max(0, a - (r % every == 0)) for r, a in enumerate(p.accepted)], domain=p.domain)
        for p in champion.prompts
    )
    return replace(champion, prompts=prompts)


def test_first_drafter_passes_without_a_champion() -> None:
    decision = decide(constant(2), None, POLICY)
    assert decision.verdict is PASS
    assert decision.tau_candidate == Interval(3.0, 3.0, 3.0)
    assert decision.tau_champion is None
    assert decision.ratio is None
    assert decision.num_prompts == 12
    assert verdicts(decision)["not worse than champion"] is PASS
    assert one_sentence(decision) == "All 4 checks passed: τ is 3.00 [3.00, 3.00] on 12 prompts."


def test_better_candidate_is_promoted_with_its_ratio() -> None:
    decision = decide(constant(3), constant(1), POLICY)
    assert decision.verdict is PASS
    assert decision.ratio == Interval(2.0, 2.0, 2.0)
    assert decision.tau_champion == Interval(2.0, 2.0, 2.0)
    assert list(verdicts(decision)) == [
        "enough prompts",
        "lossless",
        "acceptance floor",
        "not worse than champion",
        "same target",
        "same prompts",
        "same decoding settings",
    ]
    assert "2.00 times the champion's" in one_sentence(decision)


@pytest.mark.parametrize(
    ("min_tau", "verdict"), [(3.0, PASS), (3.0 + 1e-9, FAIL)], ids=["at the floor", "just under it"]
)
def test_floor_is_inclusive(min_tau: float, verdict: Verdict) -> None:
    assert decide(constant(2), None, replace(POLICY, min_tau=min_tau)).verdict is verdict


def test_floor_inside_the_interval_is_for_a_person() -> None:
    candidate = drawn(np.random.default_rng(1))
    interval = bootstrap_tau(candidate, num_resamples=500)
    decision = decide(candidate, None, replace(POLICY, min_tau=(interval.low + interval.estimate) / 2))
    assert decision.verdict is INCONCLUSIVE
    assert verdicts(decision)["acceptance floor"] is INCONCLUSIVE
    assert one_sentence(decision).startswith("Acceptance floor: the floor lies inside the interval")


def test_not_worse_passes_fails_and_hesitates_by_the_whole_interval() -> None:
    champion = drawn(np.random.default_rng(2), num_prompts=40)
    candidate = worse(champion, every=3)
    ratio = bootstrap_ratio(candidate, champion, num_resamples=500)
    assert ratio.high < 1
    cases = [
        (1 - ratio.low, PASS),
        (1 - (ratio.low + ratio.estimate) / 2, INCONCLUSIVE),
        (1 - (ratio.estimate + ratio.high) / 2, INCONCLUSIVE),
        (1 - ratio.high - 1e-6, FAIL),
    ]
    for max_loss, verdict in cases:
        decision = decide(candidate, champion, replace(POLICY, max_loss=max_loss + 1e-12))
        assert verdicts(decision)["not worse than champion"] is verdict
        assert decision.verdict is verdict
        check = next(c for c in decision.checks if c.name == "not worse than champion")
        assert check.interval == ratio
        assert check.threshold == pytest.approx(1 - max_loss)


def test_few_prompts_are_inconclusive_and_none_is_a_fail() -> None:
    few = decide(constant(3, num_prompts=7), None, POLICY)
    assert few.verdict is INCONCLUSIVE
    assert "measured 7 prompts, required at least 8" in one_sentence(few)
    single = decide(constant(3, num_prompts=1), None, POLICY)
    assert single.verdict is INCONCLUSIVE
    assert single.tau_candidate == Interval(4.0, 1.0, 8.0)
    for nothing in (report(), report(*(prompt(str(i), []) for i in range(20)))):
        decision = decide(nothing, None, POLICY)
        assert decision.verdict is FAIL
        assert verdicts(decision)["enough prompts"] is FAIL
        assert verdicts(decision)["acceptance floor"] is FAIL
        assert decide(nothing, nothing, POLICY).ratio is None
        assert still_fits(nothing, 2.0, POLICY).verdict is FAIL


def test_prompts_that_ended_at_once_do_not_count() -> None:
    candidate = report(*constant(3, num_prompts=7).prompts, prompt("silent", []))
    decision = decide(candidate, None, POLICY)
    assert (decision.verdict, decision.num_prompts) == (INCONCLUSIVE, 7)
    assert "1 of 8 ended at their first token" in decision.checks[0].measured


@pytest.mark.parametrize("lossless", [False, None])
def test_unproven_output_fails_whatever_the_numbers(lossless: bool | None) -> None:
    spoilt = replace(constant(6), prompts=(*constant(6).prompts[1:], prompt("p0", [6], lossless=lossless)))
    decision = decide(spoilt, None, POLICY)
    assert decision.verdict is FAIL
    assert verdicts(decision)["lossless"] is FAIL
    assert "11 of 12 outputs equal" in one_sentence(decision)
    # A champion that was measured wrongly makes the comparison worthless too.
    assert decide(constant(6), spoilt, POLICY).verdict is FAIL
    assert still_fits(spoilt, 2.0, POLICY).verdict is FAIL


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"target_fingerprint": "b" * 64}, "same target"),
        ({"prompts": constant(1, num_prompts=11).prompts}, "same prompts"),
        (
            {"prompts": (*constant(1).prompts[1:], replace(constant(1).prompts[0], domain="code"))},
            "same prompts",
        ),
        ({"temperature": 0.5}, "same decoding settings"),
        ({"max_new_tokens": 65}, "same decoding settings"),
    ],
)
def test_only_like_is_compared_with_like(change: dict[str, Any], check: str) -> None:
    decision = decide(constant(3), replace(constant(1), **change), POLICY)
    assert decision.verdict is FAIL
    assert decision.ratio is None
    failed = [name for name, verdict in verdicts(decision).items() if verdict is FAIL]
    assert failed == ["not worse than champion", check]
    assert "cannot be compared" in one_sentence(decision)
    assert "1 more in the report" in one_sentence(decision)


def test_a_fail_outweighs_what_is_unsettled() -> None:
    decision = decide(constant(1, num_prompts=3), None, replace(POLICY, min_tau=4.0))
    assert verdicts(decision)["enough prompts"] is INCONCLUSIVE
    assert decision.verdict is FAIL
    assert one_sentence(decision).startswith("Acceptance floor: ")


@pytest.mark.parametrize(("promised", "verdict"), [(3.0, PASS), (3.15, PASS), (3.16, FAIL), (6.0, FAIL)])
def test_champion_is_certified_within_the_allowed_loss(promised: float, verdict: Verdict) -> None:
    decision = still_fits(constant(2), promised, POLICY)
    assert decision.verdict is verdict
    assert decision.tau_candidate.estimate == 3.0
    assert list(verdicts(decision)) == [
        "enough prompts",
        "lossless",
        "acceptance floor",
        "loss since promotion",
    ]


def test_uncertainty_does_not_certify() -> None:
    champion = drawn(np.random.default_rng(4))
    promised = bootstrap_tau(champion, num_resamples=500).estimate
    unsure = still_fits(champion, promised, replace(POLICY, certify_loss=0.0))
    assert unsure.verdict is INCONCLUSIVE
    assert "realigned" in one_sentence(unsure)
    assert still_fits(champion, promised, replace(POLICY, certify_loss=0.5)).verdict is PASS


def test_on_the_same_prompts_the_champion_is_compared_with_itself() -> None:
    """Prompts that differ widely leave a wide τ, yet the same drafter on the same target has lost nothing."""
    then, now = drawn_pair(np.random.default_rng(3), num_prompts=24, skills=(0.6, 0.6))
    promised = bootstrap_tau(then, num_resamples=500).estimate
    assert still_fits(then, promised, POLICY).verdict is not PASS
    decision = still_fits(then, promised, POLICY, then)
    assert decision.verdict is PASS
    assert decision.checks[-1].interval == Interval(1.0, 1.0, 1.0)
    assert still_fits(worse(then, every=1), promised, POLICY, then).verdict is FAIL
    # Other prompts, or decoded otherwise: only the number that was promised is left.
    for other in (replace(then, prompts=then.prompts[:-1]), replace(then, max_new_tokens=7)):
        assert still_fits(now, promised, POLICY, other).checks[-1].name == "loss since promotion"


@pytest.mark.parametrize("promised", [float("nan"), float("inf"), 0.0])
def test_an_impossible_promise_is_refused(promised: float) -> None:
    with pytest.raises(ValueError, match="promised"):
        still_fits(constant(2), promised, POLICY)


@pytest.mark.parametrize(
    "change",
    [
        {"min_tau": float("nan")},
        {"max_loss": 1.0},
        {"certify_loss": -0.1},
        {"confidence": 1.0},
        {"min_prompts": 0},
    ],
)
def test_a_policy_without_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no gate"):
        replace(POLICY, **change)


def test_every_check_speaks() -> None:
    for decision in (decide(constant(3), constant(1), POLICY), still_fits(constant(3), 9.0, POLICY)):
        for check in decision.checks:
            assert check.measured
            assert check.required
            assert check.explanation


def test_the_same_inputs_give_the_same_decision() -> None:
    one, other = drawn(np.random.default_rng(5)), drawn(np.random.default_rng(6))
    assert decide(one, other, POLICY) == decide(one, other, POLICY)
