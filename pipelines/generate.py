"""Stage `generate`: the new target answers the training prompts, fanned out over actors."""

from __future__ import annotations

from typing import Any

from dflash_core.artifacts import Workspace
from dflash_core.errors import UserError
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.sharded import Row, work_off
from pipelines.stage import StageResult
from pipelines.telemetry import progress, say

CODE_VERSION = 5


def plan(context: Context, train_prompts: str) -> Plan:
    """What the answers depend on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "prompts": train_prompts,
        "dtype": context.placement.dtype,
        "stop_ids": list(context.checkpoint.eos_ids),
        "shard_prompts": context.config.generate.shard_prompts,
        "seed": context.config.seed,
        **_settings(context),
    }
    return Plan("generate", inputs, CODE_VERSION)


def run(context: Context, planned: Plan, inspected: StageResult) -> StageResult:
    """Samples in `samples-NNNNN.jsonl`, one for each `train-NNNNN.jsonl`; resumable shard by shard."""
    num_prompts = inspected.artifact.meta["num_train"]

    def body(workspace: Workspace) -> dict[str, Any]:
        with progress("generate", num_prompts, "prompts", context.target_name) as bar:
            totals = work_off(
                workspace,
                "GenerateWorker",
                {
                    "checkpoint": context.checkpoint,
                    "guard": context.guard,
                    "placement": context.placement,
                    "workspace": workspace,
                    "inspected": inspected.artifact,
                    "settings": _settings(context),
                },
                _tasks(inspected.artifact.meta["train_shards"], context.config.seed),
                context.placement,
                context.connect,
                lambda row, fresh: bar.advance(
                    row["prompts"], fresh=fresh, tokens=row["tokens"], bytes=row["bytes"]
                ),
            )
        if totals["tokens"] <= totals["samples"]:
            raise UserError(
                f"{context.checkpoint.path} answers every prompt with one token at most or without end, so "
                "there is nothing to train on; check its chat template"
            )
        if totals["repetitive"]:
            count = totals["samples"] + totals["repetitive"]
            left_out = f"{totals['repetitive']} of {count} answers"
            say(f"generate: {left_out} repeat themselves to the end and are left out")
        return {**totals.pick("samples", "repetitive", "tokens", "seconds"), "peak_mb": totals.peak_mb}

    return planned.run(context, body)


def _settings(context: Context) -> dict[str, Any]:
    options = context.config.generate
    return {
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "batch_size": options.batch_size or 8,
    }


def _tasks(shards: list[str], seed: int) -> list[Row]:
    """One task per shard of prompts."""
    return [
        {"name": shard.replace("train-", "samples-"), "prompts": shard, "seed": seed + number}
        for number, shard in enumerate(shards)
    ]
