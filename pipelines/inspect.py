"""Stage `inspect`: render every prompt as serving would, check that it fits, freeze those that do.

Its artifact is what later stages read: `train-NNNNN.jsonl`, one shard of prompts each, and `gate.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.prompts.prompt_files import load_prompts, shards, write_prompts
from dflash_core.prompts.thinking import check_thinking
from dflash_core.store.artifacts import Artifact, Workspace
from dflash_core.types import Prompt
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.prompts import Chosen
from pipelines.stage import StageResult
from pipelines.telemetry import progress, say

if TYPE_CHECKING:
    from dflash_core.prompts.prompt_lengths import FittingPrompts

CODE_VERSION = 4


def plan(context: Context, chosen: Chosen) -> Plan:
    """What the frozen prompts depend on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "train": chosen.train_fingerprint,
        "gate": chosen.gate_fingerprint,
        "train_new_tokens": context.config.generate.max_new_tokens,
        "gate_new_tokens": context.config.evaluate.max_new_tokens,
        "shard_prompts": context.config.generate.shard_prompts,
    }
    return Plan("inspect", inputs, CODE_VERSION)


def run(context: Context, chosen: StageResult) -> StageResult:
    """Freeze the prompts for this target. Raises UserError if too many of the user's own do not fit."""
    artifact, config = chosen.artifact, context.config

    def body(workspace: Workspace) -> dict[str, Any]:
        from dflash_core.prompts.prompt_lengths import NUM_NAMED

        check_thinking(context.checkpoint, config.generate.thinking)
        # Traces have been answered: stage `traces` looks at their tokens itself.
        asked = [] if config.traces else artifact.meta["train_shards"]
        own = config.prompts or config.traces
        train = _fitting(context, config.generate.max_new_tokens, own=bool(own))
        gate = _fitting(
            context,
            config.evaluate.max_new_tokens,
            own=bool(config.eval_prompts or own),
            served=bool(config.traces and not config.eval_prompts),
        )
        total = artifact.meta["num_gate"] + (artifact.meta["num_train"] if asked else 0)
        with (
            workspace.scratch() as scratch,
            progress("inspect", total, "prompts", context.target_name) as bar,
        ):
            kept = list(gate.of(load_prompts(artifact.local("gate.jsonl")), bar.advance))
            gate.conclude()
            fitting = train.of(_prompts_of(artifact, asked), bar.advance)
            names = _write_shards(scratch, fitting, config.generate.shard_prompts or 256)
            train.conclude()
            write_prompts(scratch / "gate.jsonl", kept)
            for name in (*names, "gate.jsonl"):
                workspace.put(name, scratch / name)
        num_too_long = train.num_too_long + gate.num_too_long
        if num_too_long:
            named = ", ".join(map(repr, [*gate.too_long, *train.too_long][:NUM_NAMED]))
            prompts = "prompt is" if num_too_long == 1 else "prompts are"
            limit = context.checkpoint.config.max_positions
            say(
                f"inspect: {num_too_long:,} {prompts} too long for the target's context of {limit:,} tokens "
                f"and left out{' (' if num_too_long <= NUM_NAMED else ', such as ('}{named})"
            )
        return {
            "num_train": train.num_kept,
            "train_shards": names,
            "num_gate": len(kept),
            "num_too_long": num_too_long,
            "source": artifact.meta["source"],
        }

    return plan(context, Chosen.of(artifact.meta)).run(context, body)


def _prompts_of(artifact: Artifact, names: list[str]) -> Iterator[Prompt]:
    """One shard in memory at a time."""
    return (prompt for name in names for prompt in load_prompts(artifact.local(name)))


def _write_shards(scratch: Path, prompts: Iterator[Prompt], size: int) -> list[str]:
    names = []
    for name, shard in shards(prompts, size):
        write_prompts(scratch / name, shard)
        names.append(name)
    return names


def _fitting(
    context: Context, max_new_tokens: int | None, *, own: bool, served: bool = False
) -> FittingPrompts:
    """own: the user gave these prompts; the shipped ones know nothing of the target. served: from traces."""
    from dflash_core.checkpoints.checkpoint import load_tokenizer
    from dflash_core.prompts.prompt_lengths import FittingPrompts

    checkpoint = context.checkpoint
    positions = checkpoint.config.max_positions
    return FittingPrompts(
        load_tokenizer(checkpoint), max_new_tokens or 0, positions, any_share=not own, served=served
    )
