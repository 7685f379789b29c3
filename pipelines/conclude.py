"""The end of a realignment: the report, the run in MLflow, and the registry's new state.

Order matters for a crash: report, then the run, then the version, then the aliases, then the note that
this request is settled. Each step finds what an earlier, killed run left and goes on from there.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_core import tags as t
from dflash_core.decision.gate import one_sentence
from dflash_core.decision.report import RealignReport, write_report
from dflash_core.decoding.acceptance import acceptance_by_position
from dflash_core.errors import LeaseHeldError
from dflash_core.fingerprint import fingerprint
from dflash_core.store.artifacts import Lease, Workspace
from dflash_core.tracking import display_uri
from dflash_core.types import AcceptanceReport, GateDecision, Interval, Outcome
from pipelines import settled
from pipelines.champion import Champion
from pipelines.evaluate import Subject, acceptance
from pipelines.plan import Plan
from pipelines.prepare import Prepared
from pipelines.registry import RegisteredDrafter
from pipelines.result import RealignResult, StageSummary
from pipelines.stage import StageResult
from pipelines.telemetry import say

CODE_VERSION = 3
_CURVES = {"loss", "proxy_tau", "held_out_tau", "gradient_norm", "learning_rate"}


@dataclass(frozen=True)
class Evidence:
    """What the flow has made and measured so far."""

    drawn: StageResult
    """The prompts."""
    inspected: StageResult
    stages: tuple[StageResult, ...] = ()
    champion: Champion | None = None
    champion_report: AcceptanceReport | None = None
    not_certified: GateDecision | None = None
    corpus: StageResult | None = None
    features: StageResult | None = None
    trained: StageResult | None = None
    candidate: Subject | None = None
    candidate_report: AcceptanceReport | None = None

    def with_champion(self, champion: Champion, measured: StageResult) -> Evidence:
        return replace(
            self,
            stages=(*self.stages, replace(measured, name="evaluate champion")),
            champion=champion,
            champion_report=acceptance(measured),
        )

    def with_training(
        self, corpus: tuple[StageResult, ...], features: StageResult, trained: StageResult
    ) -> Evidence:
        """corpus: the stages that made it; features are of what the last one left."""
        stages = (*self.stages, *corpus, features, trained)
        return replace(self, stages=stages, corpus=corpus[-1], features=features, trained=trained)

    def with_candidate(self, candidate: Subject, measured: StageResult) -> Evidence:
        return replace(
            self,
            stages=(*self.stages, replace(measured, name="evaluate candidate")),
            candidate=candidate,
            candidate_report=acceptance(measured),
        )

    @property
    def all_stages(self) -> tuple[StageResult, ...]:
        return (self.drawn, self.inspected, *self.stages)


def conclude(
    prepared: Prepared, outcome: Outcome, decision: GateDecision, evidence: Evidence
) -> RealignResult:
    """Write down what was decided, and let serving see it. Raises LeaseHeldError if another run promotes."""
    prepared.context.guard.check()
    _subject(evidence).artifact.local_dir()  # its content verified, before anything is written down
    reported = _report(prepared, outcome, decision, evidence)
    with _promoting(prepared):
        _check_champion(prepared, evidence)
        run_id = _log_run(prepared, outcome, decision, evidence, reported)
        version = _register(prepared, outcome, decision, evidence, run_id)
    if (held_out := _held_out_tau(evidence)) is not None:
        decoded = f"{decision.tau_candidate.estimate:.2f} decoded on the gate's prompts"
        say(f"acceptance length {held_out:.2f} on the answers held out of the training, {decoded}")
    if version is not None:
        where = display_uri(prepared.registry.tracking_uri)
        say(f"{outcome}: version {version.version} of {version.name} in {where}")
    candidate, champion = evidence.candidate_report, evidence.champion_report
    checkpoint = prepared.context.checkpoint
    certified = outcome is Outcome.CERTIFIED
    result = RealignResult(
        outcome=outcome,
        reason=one_sentence(decision),
        target_path=str(checkpoint.path),
        target_fingerprint=checkpoint.fingerprint,
        # What the gate looked at is the champion where nothing was trained.
        tau_champion=_estimate(decision.tau_candidate if certified else decision.tau_champion, champion),
        tau_candidate=None if certified else _estimate(decision.tau_candidate, candidate),
        model_name=prepared.registry.name,
        model_version=version.version if version else None,
        report=str(reported.artifact.local("report/report.html")),
        stages=tuple(StageSummary.of(stage) for stage in (*evidence.all_stages, reported)),
    )
    settled.keep(prepared.context, prepared.registry, prepared.request, result)
    return result


def _held_out_tau(evidence: Evidence) -> float | None:
    tau: float | None = evidence.trained.artifact.meta["held_out_tau"] if evidence.trained else None
    return tau


def finish_promotion(prepared: Prepared) -> None:
    """Complete what a killed run of this very request had begun to promote."""
    registry, job = prepared.registry, (prepared.context.checkpoint.fingerprint, prepared.request)
    if registry.interrupted_promotion(*job) is None:
        return
    with _promoting(prepared):
        # Looked at again: it may have been a live run in the middle of it.
        if (left := registry.interrupted_promotion(*job)) is not None:
            registry.promote(*left)


def _check_champion(prepared: Prepared, evidence: Evidence) -> None:
    """Under the lease of promotion: the decision must be about the champion that there is.

    Raises LeaseHeldError if another run has promoted meanwhile, for nobody compared with its drafter.
    """
    registry = prepared.registry
    now = registry.parent_for(prepared.context.checkpoint.fingerprint)
    seen = evidence.champion.registered if evidence.champion else None
    fine = {seen.drafter_fingerprint if seen else None, _subject(evidence).fingerprint}
    if (now.drafter_fingerprint if now else None) not in fine:
        compared = f"version {seen.version}" if seen else "no champion"
        became = f"version {now.version}" if now else "gone"
        raise LeaseHeldError(
            f"another run promoted meanwhile: the champion of {registry.name} is {became}, and this run "
            f"compared with {compared}. Run again, which finds what is done already and compares anew"
        )


def _promoting(prepared: Prepared) -> Lease:
    """One promoter of a model at a time; another one's few seconds are waited for."""
    return prepared.context.store.lease(f"promote-{prepared.registry.name}", timeout=60)


def _estimate(interval: Interval | None, report: AcceptanceReport | None) -> float | None:
    return interval.estimate if interval is not None and report is not None else None


def _report(prepared: Prepared, outcome: Outcome, decision: GateDecision, evidence: Evidence) -> StageResult:
    """Stage `gate`: the decision with everything it rests on, for people and for programs."""
    context = prepared.context

    def body(workspace: Workspace) -> dict[str, Any]:
        report = RealignReport(
            outcome=outcome,
            model_name=prepared.registry.name,
            model_version=evidence.champion.registered.version
            if outcome is Outcome.CERTIFIED and evidence.champion
            else None,
            target_path=str(context.checkpoint.path),
            target_fingerprint=context.checkpoint.fingerprint,
            drafter_fingerprint=_subject(evidence).fingerprint,
            decision=decision,
            not_certified=evidence.not_certified,
            candidate=evidence.candidate_report,
            champion=evidence.champion_report,
            stages=tuple((s.name, s.identity, s.seconds, s.cached) for s in evidence.all_stages),
            lineage=_lineage(prepared, evidence),
            settings=context.config.flat(),
            mask_token_reason=prepared.mask_token.reason,
            created_at=t.utc_now(),
        )
        with workspace.scratch() as scratch:
            write_report(scratch, report)
            for name in ("report.json", "report.html"):
                workspace.put(f"report/{name}", scratch / name)
        return {"outcome": outcome.value, "verdict": decision.verdict.value}

    inputs = {
        "request": prepared.request,
        "registry": prepared.registry.tracking_uri,
        "model": prepared.registry.name,
        "drafter": _subject(evidence).fingerprint,
        "champion": evidence.champion.fingerprint if evidence.champion else None,
        "policy": context.config.gate.model_dump(),
    }
    return Plan("gate", inputs, CODE_VERSION).run(context, body)


def _subject(evidence: Evidence) -> Subject:
    """The drafter that the decision is about."""
    if evidence.candidate is not None:
        return evidence.candidate
    assert evidence.champion is not None
    return evidence.champion.subject


def _lineage(prepared: Prepared, evidence: Evidence) -> dict[str, str]:
    """Version tags of a drafter trained here: what it was made of."""
    lineage = {
        t.TARGET_FINGERPRINT: prepared.context.checkpoint.fingerprint,
        t.TARGET_PATH: str(prepared.context.checkpoint.path),
        t.CONFIG_FINGERPRINT: fingerprint(prepared.context.config.flat()),
        t.JOB_IDENTITY: prepared.request,
        t.GIT_SHA: _git_sha(),
    }
    if evidence.corpus and evidence.features:
        lineage[t.CORPUS_FINGERPRINT] = evidence.corpus.identity
        lineage[t.FEATURES_FINGERPRINT] = evidence.features.identity
    if evidence.champion and not prepared.context.config.from_scratch:
        lineage[t.PARENT_VERSION] = str(evidence.champion.registered.version)
    return lineage


def _git_sha() -> str:
    """The commit that this code stands at; empty where it is installed without its history."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _log_run(
    prepared: Prepared, outcome: Outcome, decision: GateDecision, evidence: Evidence, reported: StageResult
) -> str:
    champion = evidence.champion
    parent = champion.fingerprint[:12] if champion else "none"
    tags = {
        t.OUTCOME: outcome.value,
        t.VERDICT: decision.verdict.value,
        t.REASON: one_sentence(decision),
        t.TARGET_FINGERPRINT: prepared.context.checkpoint.fingerprint,
        t.TARGET_PATH: str(prepared.context.checkpoint.path),
        # The same request against another champion is another run.
        t.JOB_IDENTITY: f"{prepared.request}-{parent}",
    }
    if champion is not None:
        tags[t.CHAMPION_VERSION] = str(champion.registered.version)
    if outcome is Outcome.CERTIFIED and champion is not None:
        tags[t.DRAFTER_VERSION] = str(champion.registered.version)
    metrics = {f"{t.STAGE_SECONDS_PREFIX}{s.name.replace(' ', '_')}": s.seconds for s in evidence.all_stages}
    curves = _training_curves(evidence.trained)
    if evidence.candidate_report is not None:
        metrics |= t.interval_metrics(t.TAU_CANDIDATE, decision.tau_candidate)
        if (held_out := _held_out_tau(evidence)) is not None:
            metrics[t.TAU_HELD_OUT] = held_out
        curves[t.ACCEPTANCE_CANDIDATE] = _by_position(evidence.candidate_report)
    champion_tau = decision.tau_champion if evidence.candidate_report else decision.tau_candidate
    if evidence.champion_report is not None and champion_tau is not None:
        metrics |= t.interval_metrics(t.TAU_CHAMPION, champion_tau)
        curves[t.ACCEPTANCE_CHAMPION] = _by_position(evidence.champion_report)
    return prepared.registry.log_run(
        tags=tags,
        params=prepared.context.config.flat(),
        metrics=metrics,
        step_metrics=curves,
        report_dir=reported.artifact.local_dir() / "report",
    )


def _by_position(report: AcceptanceReport) -> dict[int, float]:
    return dict(enumerate(acceptance_by_position(report), start=1))


def _training_curves(trained: StageResult | None) -> dict[str, dict[int, float]]:
    """What training reported, by step."""
    curves: dict[str, dict[int, float]] = {}
    if trained is not None:
        for point in json.loads(trained.artifact.local("curve.json").read_text(encoding="utf-8")):
            for key in _CURVES & point.keys():
                curves.setdefault(t.TRAIN_PREFIX + key, {})[point["step"]] = point[key]
    return curves


def _register(
    prepared: Prepared, outcome: Outcome, decision: GateDecision, evidence: Evidence, run_id: str
) -> RegisteredDrafter | None:
    """Bring the registry to the state that the outcome asks for. A rejected drafter leaves no version."""
    registry = prepared.registry
    entry: t.ServeEntry = {
        "target_fingerprint": prepared.context.checkpoint.fingerprint,
        "target_path": str(prepared.context.checkpoint.path),
        "tau": decision.tau_candidate.estimate,
        "tau_low": decision.tau_candidate.low,
        "tau_high": decision.tau_candidate.high,
        "outcome": outcome.value,
        "job_identity": prepared.request,
        "run_id": run_id,
        "at": t.utc_now(),
    }
    if outcome is Outcome.REJECTED:
        return None
    if outcome is Outcome.CERTIFIED:
        assert evidence.champion is not None
        return registry.certify(evidence.champion.registered.version, entry)
    candidate = _subject(evidence)
    tags = {
        **_lineage(prepared, evidence),
        t.DRAFTER_FINGERPRINT: candidate.fingerprint,
        t.BLOCK_SIZE: str(candidate.block_size),
        t.TAU: repr(decision.tau_candidate.estimate),
        t.TAU_LOW: repr(decision.tau_candidate.low),
        t.TAU_HIGH: repr(decision.tau_candidate.high),
        t.GATE: decision.verdict.value,
        t.OUTCOME: outcome.value,
    }
    registered = registry.register(candidate.artifact.local_dir() / "drafter", run_id, tags)
    if outcome is Outcome.HELD:
        return registry.hold(registered.version)
    return registry.promote(registered.version, entry)
