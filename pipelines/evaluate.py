"""Stage `evaluate`: acceptance of a drafter on the target, measured by decoding the gate prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dflash_core.decoding.acceptance import from_json, tau, to_json
from dflash_core.store.artifacts import Artifact, Workspace
from dflash_core.types import AcceptanceReport, PromptResult
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.sharded import Row, work_off
from pipelines.stage import StageResult
from pipelines.telemetry import progress

CODE_VERSION = 2


@dataclass(frozen=True)
class Subject:
    """A drafter to be measured."""

    role: str
    """"champion" or "candidate": how the progress bar calls it."""
    artifact: Artifact
    """Holds the drafter in `drafter/`."""
    fingerprint: str
    block_size: int


def plan(context: Context, gate_prompts: str, drafter_fingerprint: str) -> Plan:
    """What a measurement depends on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "drafter": drafter_fingerprint,
        "prompts": gate_prompts,
        "dtype": context.placement.dtype,
        "stop_ids": list(context.checkpoint.eos_ids),
        "seed": context.config.seed,
        **_decoding(context),
    }
    return Plan("evaluate", inputs, CODE_VERSION)


def run(context: Context, gate_prompts: str, inspected: StageResult, subject: Subject) -> StageResult:
    """`acceptance.json` of a drafter on the gate prompts (`gate_prompts`: their fingerprint); resumable."""
    options, checkpoint = context.config.evaluate, context.checkpoint
    num_prompts = inspected.artifact.meta["num_gate"]

    def body(workspace: Workspace) -> dict[str, Any]:
        tasks = [{"name": f"prompt-{i:05d}", "prompt": i} for i in range(num_prompts)]
        results: dict[str, PromptResult] = {}
        with progress(f"evaluate {subject.role}", num_prompts, "prompts", context.target_name) as bar:

            def on_row(row: Row, fresh: bool) -> None:
                results[row["name"]] = _result(row)
                bar.advance(1, fresh=fresh, tokens=sum(row["emitted"]), rounds=len(row["emitted"]))

            totals = work_off(
                workspace,
                "EvaluateWorker",
                {
                    "checkpoint": checkpoint,
                    "guard": context.guard,
                    "placement": context.placement,
                    "workspace": workspace,
                    "inspected": inspected.artifact,
                    "drafter": subject.artifact,
                    "decoding": _decoding(context),
                    "seed": context.config.seed,
                },
                tasks,
                context.placement,
                context.connect,
                on_row,
            )
        report = AcceptanceReport(
            block_size=subject.block_size,
            prompts=tuple(results[str(task["name"])] for task in tasks),
            drafter_fingerprint=subject.fingerprint,
            target_fingerprint=checkpoint.fingerprint,
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens or 0,
        )
        workspace.put_json("acceptance.json", to_json(report))
        return {
            "tau": tau(report),
            "tokens": report.tokens,
            "rounds": report.rounds,
            "peak_mb": totals.peak_mb,
        }

    return plan(context, gate_prompts, subject.fingerprint).run(context, body)


def at_promotion(
    context: Context, gate_prompts: str, drafter_fingerprint: str, target_fingerprint: str
) -> AcceptanceReport | None:
    """What these prompts gave on the target that the drafter was promoted for, if this store has it."""
    here = plan(context, gate_prompts, drafter_fingerprint)
    then = Plan(here.name, {**here.inputs, "target": target_fingerprint}, here.code_version)
    artifact = context.store.artifact(then.name, then.identity)
    return None if artifact is None else _read(artifact)


def _decoding(context: Context) -> dict[str, Any]:
    options = context.config.evaluate
    return {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}


def acceptance(evaluated: StageResult) -> AcceptanceReport:
    """What an evaluate stage measured."""
    return _read(evaluated.artifact)


def _read(artifact: Artifact) -> AcceptanceReport:
    return from_json(json.loads(artifact.local("acceptance.json").read_text(encoding="utf-8")))


def _result(row: Row) -> PromptResult:
    return PromptResult(
        id=row["id"],
        domain=row["domain"],
        accepted=tuple(row["accepted"]),
        emitted=tuple(row["emitted"]),
        num_response_tokens=row["num_response_tokens"],
        seconds=row["seconds"],
        lossless=row["lossless"],
    )
