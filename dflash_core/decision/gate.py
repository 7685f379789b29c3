"""The gate: measurements and a policy in, a decision with its reasons out. Pure; no file, no clock.

Any failed check fails the whole; otherwise any that could not be settled leaves it to a person.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_core.decision import gate_checks as checks
from dflash_core.decoding.statistics import bootstrap_ratio, bootstrap_tau, pairing_problem
from dflash_core.types import AcceptanceReport, GateCheck, GateDecision, Interval, Verdict


@dataclass(frozen=True)
class GatePolicy:
    """What a drafter must show. Raises ValueError for a threshold that makes no sense."""

    min_tau: float
    """Floor of the mean acceptance length."""
    max_loss: float = 0.03
    """Largest loss of τ against the champion, as a fraction, at which a candidate is not worse."""
    certify_loss: float = 0.05
    """Largest loss of the promised τ, as a fraction, at which a champion still fits without training."""
    confidence: float = 0.95
    """Of every two-sided interval."""
    min_prompts: int = 8
    num_resamples: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        sound = (
            math.isfinite(self.min_tau)
            and 0 <= self.max_loss < 1
            and 0 <= self.certify_loss < 1
            and 0 < self.confidence < 1
            and self.min_prompts >= 1
            and self.num_resamples >= 1
        )
        if not sound:
            raise ValueError(f"no gate can apply {self}")


def decide(
    candidate: AcceptanceReport, champion: AcceptanceReport | None, policy: GatePolicy
) -> GateDecision:
    """Whether `candidate` may be promoted over `champion`, both measured on the new target."""
    tau = _tau(candidate, policy)
    measured = [candidate] if champion is None else [candidate, champion]
    asked = [
        checks.enough_prompts(candidate, policy.min_prompts),
        checks.all_lossless(measured),
        checks.floor(tau, policy.min_tau),
    ]
    if champion is None:
        asked.append(checks.no_champion(policy.max_loss))
        return _decision(candidate, asked, tau, None, None, policy)
    sameness = checks.comparable(candidate, champion)
    problem = next((check.explanation for check in sameness if check.verdict is Verdict.FAIL), None)
    ratio = None
    if problem is None and candidate.rounds and champion.rounds:
        ratio = bootstrap_ratio(candidate, champion, policy.confidence, policy.num_resamples, policy.seed)
    asked += [checks.not_worse(ratio, problem, policy.max_loss), *sameness]
    return _decision(candidate, asked, tau, _tau(champion, policy), ratio, policy)


def still_fits(
    champion: AcceptanceReport,
    promised_tau: float,
    policy: GatePolicy,
    at_promotion: AcceptanceReport | None = None,
) -> GateDecision:
    """Whether the drafter that serves fits a new target as it is; only PASS certifies, all else realigns.

    `tau_candidate` of the decision is the champion's τ on the new target. `at_promotion` is what was
    measured when it was promoted: on the same prompts, decoded alike, the two are paired, and the whole
    interval of their ratio has to lie above 1 - certify_loss. Otherwise `promised_tau`, the τ it was
    promoted with, is taken as a fixed number, and the whole interval measured now has to lie above
    (1 - certify_loss) times it. Raises ValueError for a promise that no drafter can have made.
    """
    if not (math.isfinite(promised_tau) and promised_tau >= 1):
        raise ValueError(f"a promised τ of {promised_tau} is no number from 1 on: measure the champion again")
    tau = _tau(champion, policy)
    asked = [
        checks.enough_prompts(champion, policy.min_prompts),
        checks.all_lossless([champion]),
        checks.floor(tau, policy.min_tau),
        _promise(champion, tau, promised_tau, at_promotion, policy),
    ]
    return _decision(champion, asked, tau, None, None, policy)


def _promise(
    now: AcceptanceReport,
    tau: Interval,
    promised_tau: float,
    then: AcceptanceReport | None,
    policy: GatePolicy,
) -> GateCheck:
    """Paired where it can be: pairing takes out what makes a prompt easy or hard for any drafter."""
    paired = then is not None and not pairing_problem(now, then) and not checks.decoding_problem(now, then)
    if then is None or not paired or not now.rounds or not then.rounds:
        return checks.promise_kept(tau, promised_tau, policy.certify_loss)
    ratio = bootstrap_ratio(now, then, policy.confidence, policy.num_resamples, policy.seed)
    return checks.promise_kept_paired(ratio, policy.certify_loss)


def one_sentence(decision: GateDecision) -> str:
    """Why the gate decided so: the first check that settled it."""
    if decision.verdict is Verdict.PASS:
        versus = f", {decision.ratio.estimate:.2f} times the champion's" if decision.ratio else ""
        return (
            f"All {len(decision.checks)} checks passed: τ is {checks.show(decision.tau_candidate)} "
            f"on {decision.num_prompts} prompts{versus}."
        )
    first, *others = (check for check in decision.checks if check.verdict is decision.verdict)
    more = f"; {len(others)} more in the report" if others else ""
    name = first.name[0].upper() + first.name[1:]
    return f"{name}: {first.explanation} (measured {first.measured}, required {first.required}){more}."


def _decision(
    subject: AcceptanceReport,
    asked: list[GateCheck],
    tau: Interval,
    champion_tau: Interval | None,
    ratio: Interval | None,
    policy: GatePolicy,
) -> GateDecision:
    verdicts = {check.verdict for check in asked}
    worst = next(v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.PASS) if v in verdicts)
    num_prompts = checks.num_measured(subject)
    return GateDecision(worst, tuple(asked), tau, champion_tau, ratio, num_prompts, policy.confidence)


def _tau(report: AcceptanceReport, policy: GatePolicy) -> Interval:
    if not report.rounds:
        return checks.NOT_MEASURED
    return bootstrap_tau(report, policy.confidence, policy.num_resamples, policy.seed)
