"""Requests that are settled already, so that a rerun says so in seconds and touches neither Ray nor torch.

A request is what the user asked for: this target, these prompts, this configuration. Together with the
drafter that serves now it decides what would happen; the outcome is kept in the store under both, and
believed only while the registry still agrees.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from dflash_core.fingerprint import fingerprint
from dflash_core.store.artifacts import Workspace
from dflash_core.types import Outcome
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.registry import RegisteredDrafter, Registry
from pipelines.result import RealignResult, StageSummary

CODE_VERSION = 1
NOT_THE_REQUEST = {
    *("target", "prompts", "traces", "eval_prompts", "chat_template"),
    *("store", "tracking_uri", "model_name", "ray_address", "resources", "device", "dtype"),
}
"""Configuration that says where things are or where to run; what is read from there counts by content."""


def request_identity(context: Context, prompts: Plan) -> str:
    """What was asked for, whatever the paths and the machine's size."""
    return fingerprint(
        {
            "target": context.checkpoint.fingerprint,
            "prompts": prompts.identity,
            "dtype": context.placement.dtype,
            "config": context.config.model_dump(mode="json", exclude=NOT_THE_REQUEST),
        }
    )


def find(
    context: Context, registry: Registry, request: str, current: RegisteredDrafter | None
) -> RealignResult | None:
    """The settled outcome of `request` while `current` is what the registry offers for this target."""
    checkpoint = context.checkpoint
    serving = registry.serving(checkpoint.fingerprint)
    artifact = context.store.artifact("settled", _plan(registry, request, current).identity)
    if artifact is not None:
        result = _read(json.loads(artifact.local("result.json").read_text(encoding="utf-8")))
        serves = serving is not None and serving.version == result.model_version
        if serves or result.outcome in (Outcome.REJECTED, Outcome.HELD):
            return result
    if serving is None:
        return None
    entry = serving.serves[checkpoint.fingerprint]
    if entry["job_identity"] != request:
        return None
    # Settled with another store: the registry knows the outcome, though not the stages.
    return RealignResult(
        outcome=Outcome(entry["outcome"]),
        reason="the registry says that this very request is settled",
        target_path=str(checkpoint.path),
        target_fingerprint=checkpoint.fingerprint,
        tau_champion=None,
        tau_candidate=entry["tau"] if entry["outcome"] == Outcome.PROMOTED else None,
        model_name=serving.name,
        model_version=serving.version,
        report=None,
        stages=(),
        already_done=True,
    )


def keep(context: Context, registry: Registry, request: str, result: RealignResult) -> None:
    """Remember `result`, under the drafter that the registry now offers for this target."""

    def body(workspace: Workspace) -> dict[str, Any]:
        workspace.put_json("result.json", result.to_json())
        return {"outcome": result.outcome.value}

    current = registry.parent_for(context.checkpoint.fingerprint)
    quiet = dataclasses.replace(context, on_event=lambda _event: None)
    _plan(registry, request, current).run(quiet, body)


def _plan(registry: Registry, request: str, current: RegisteredDrafter | None) -> Plan:
    inputs = {
        "request": request,
        "registry": registry.tracking_uri,
        "model": registry.name,
        "current": current.drafter_fingerprint if current else None,
    }
    return Plan("settled", inputs, CODE_VERSION)


def _read(data: dict[str, Any]) -> RealignResult:
    return RealignResult(
        outcome=Outcome(data["outcome"]),
        reason=data["reason"],
        target_path=data["target"]["path"],
        target_fingerprint=data["target"]["fingerprint"],
        tau_champion=data["tau"]["champion"],
        tau_candidate=data["tau"]["candidate"],
        model_name=data["model"]["name"],
        model_version=data["model"]["version"],
        report=data["report"],
        stages=tuple(StageSummary(**{**stage, "seconds": 0.0, "cached": True}) for stage in data["stages"]),
        already_done=True,
    )
