"""The realign flow, read top to bottom: a target checkpoint goes in, a decision comes out.

prompts -> inspect -> evaluate champion (if any) -> certified, or: generate (or traces) -> select (if asked)
-> extract -> train -> evaluate candidate -> gate -> register. Every stage finds its output if it exists, so
a rerun of a killed night continues.
"""

from __future__ import annotations

from dataclasses import replace

from dflash_core.decision.gate import decide, one_sentence, still_fits
from dflash_core.types import Outcome, Verdict
from pipelines import (
    evaluate,
    extract,
    generate,
    inspect,
    kept_budget,
    prompts,
    select,
    settled,
    traces,
    train,
)
from pipelines.champion import fetch_champion
from pipelines.conclude import Evidence, conclude, finish_promotion
from pipelines.drafters import candidate_of, gate_policy
from pipelines.mend import mending
from pipelines.prepare import Prepared
from pipelines.result import RealignResult
from pipelines.telemetry import say

_OUTCOMES = {
    Verdict.PASS: Outcome.PROMOTED,
    Verdict.FAIL: Outcome.REJECTED,
    Verdict.INCONCLUSIVE: Outcome.HELD,
}


def realign(prepared: Prepared) -> RealignResult:
    """Align the drafter of this target's family with this target, or find that it is aligned.

    Raises UserError for unusable input and LeaseHeldError when another run is at the same work.
    """
    return mending(prepared.context.store, lambda: _realign(prepared))


def _realign(prepared: Prepared) -> RealignResult:
    context, registry = prepared.context, prepared.registry
    finish_promotion(prepared)
    current = registry.parent_for(context.checkpoint.fingerprint)
    if (done := settled.find(context, registry, prepared.request, current)) is not None:
        return done

    drawn = prompts.run(context, prepared.prompts)
    chosen = prompts.Chosen.of(drawn.artifact.meta)
    evidence = Evidence(drawn=drawn, inspected=inspect.run(context, drawn))
    kept_budget.keep(context, prepared.asked)

    champion = fetch_champion(context, registry, current) if current else None
    if champion is not None:
        measured = evaluate.run(context, chosen.gate_fingerprint, evidence.inspected, champion.subject)
        evidence = evidence.with_champion(champion, measured)
    if champion is not None and not context.config.from_scratch:
        policy = gate_policy(context.config, champion.drafter.block_size)
        then = evaluate.at_promotion(
            context, chosen.gate_fingerprint, champion.fingerprint, champion.promised_target
        )
        decision = still_fits(evaluate.acceptance(measured), champion.promised_tau, policy, then)
        if decision.verdict is Verdict.PASS:
            return conclude(prepared, Outcome.CERTIFIED, decision, evidence)
        say(
            f"the champion, version {champion.registered.version}, is not certified. {one_sentence(decision)}"
        )
        evidence = replace(evidence, not_certified=decision)

    parent = champion if champion is not None and not context.config.from_scratch else None
    shape = parent.drafter if parent else prepared.shape
    if context.config.traces:
        generated = traces.run(context, drawn)
    else:
        planned = generate.plan(context, chosen.train_fingerprint)
        generated = generate.run(context, planned, evidence.inspected)
    corpus = select.run(context, generated, parent)
    extracted = extract.run(
        context, extract.plan(context, corpus[-1].identity, shape.target_layer_ids), corpus[-1]
    )
    trained = train.run(
        context, train.plan(context, extracted.identity, shape, parent), extracted, shape, parent
    )
    evidence = evidence.with_training(corpus, extracted, trained)

    candidate = candidate_of(trained, shape)
    measured = evaluate.run(context, chosen.gate_fingerprint, evidence.inspected, candidate)
    evidence = evidence.with_candidate(candidate, measured)
    policy = gate_policy(context.config, shape.block_size)
    decision = decide(evaluate.acceptance(measured), evidence.champion_report, policy)
    return conclude(prepared, _OUTCOMES[decision.verdict], decision, evidence)
