"""Stage `generate`: the new target answers the training prompts, fanned out over actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from dflash_core.errors import UserError
from dflash_core.store.artifacts import Workspace
from pipelines.context import Context
from pipelines.engines import EngineOptions
from pipelines.plan import Plan
from pipelines.sharded import Row, Totals, work_off
from pipelines.stage import StageResult
from pipelines.telemetry import progress, say

CODE_VERSION = 7


def plan(context: Context, train_prompts: str) -> Plan:
    """What the answers depend on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "prompts": train_prompts,
        "dtype": context.placement.dtype,
        "stop_ids": list(context.checkpoint.eos_ids),
        "shard_prompts": context.config.generate.shard_prompts,
        "seed": context.config.seed,
        **asdict(EngineOptions.of(context.config)),
    }
    return Plan("generate", inputs, CODE_VERSION)


def run(context: Context, planned: Plan, inspected: StageResult) -> StageResult:
    """Samples in `samples-NNNNN.jsonl`, one for each `train-NNNNN.jsonl`; resumable shard by shard."""
    num_prompts = inspected.artifact.meta["num_train"]
    options = EngineOptions.of(context.config)

    def body(workspace: Workspace) -> dict[str, Any]:
        with progress("generate", num_prompts, "prompts", context.target_name) as bar, _own_actors(options):
            totals = work_off(
                workspace,
                "generate_worker.GenerateWorker",
                {
                    "checkpoint": context.checkpoint,
                    "guard": context.guard,
                    "placement": context.placement,
                    "workspace": workspace,
                    "inspected": inspected.artifact,
                    "options": options,
                    "seed": context.config.seed,
                },
                _tasks(inspected.artifact.meta["train_shards"]),
                context.placement,
                context.connect,
                lambda row, fresh: bar.advance(
                    row["prompts"], fresh=fresh, tokens=row["tokens"], bytes=row["bytes"]
                ),
            )
        return _meta(context, totals)

    return planned.run(context, body)


def _tasks(shards: list[str]) -> list[Row]:
    """One task per shard of prompts."""
    return [{"name": shard.replace("train-", "samples-"), "prompts": shard} for shard in shards]


@contextmanager
def _own_actors(options: EngineOptions) -> Iterator[None]:
    """vLLM takes an actor's whole memory: none that holds a target goes in, and none of its comes out."""
    if options.name != "vllm":
        yield
        return
    from pipelines.pool import release_actors

    release_actors()
    try:
        yield
    finally:
        release_actors()


def _meta(context: Context, totals: Totals) -> dict[str, Any]:
    """What is recorded with the answers. Raises UserError if there is nothing to learn from them."""
    from dflash_core.corpus.trace_samples import template_sha256

    answers = totals["stop"] + totals["length"]
    if totals["tokens"] <= answers:
        raise UserError(
            f"{context.checkpoint.path} answers every prompt with one token at most or without end, so "
            "there is nothing to train on; check its chat template"
        )
    if totals["repetitive"]:
        left_out = f"{totals['repetitive']} of {answers + totals['repetitive']} answers"
        say(f"generate: {left_out} repeat themselves to the end and are left out")
    options = context.config.generate
    return {
        **totals.pick("samples", "tokens", "stop", "length", "repetitive", "domains", "seconds"),
        "peak_mb": totals.peak_mb,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "seed": context.config.seed,
        "engines": sorted(totals["engines"]),
        "chat_template_sha256": template_sha256(context.checkpoint),
    }
