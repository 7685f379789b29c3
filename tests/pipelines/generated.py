"""Stage `generate` of a tiny target on given prompts, in a real store through real actors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.prompts.prompt_files import write_prompts
from dflash_core.store.artifacts import Store, Workspace
from dflash_core.types import Prompt, Sample
from pipelines import generate
from pipelines.budget import resolve_budget
from pipelines.config import GenerateSection, RealignConfig
from pipelines.context import Context
from pipelines.placement import Machine, place
from pipelines.plan import Plan
from pipelines.stage import StageResult


def context_for(store: Path, target: Path, **options: Any) -> Context:
    """options: of config section `generate`."""
    checkpoint = open_checkpoint(target)
    config = RealignConfig(target=str(target), seed=3, generate=GenerateSection(**options))
    config = resolve_budget(config, checkpoint.num_parameters, 0, 2)
    placement = place(config, Machine(num_cpus=2, num_gpus=0), checkpoint.num_parameters)
    return Context(
        config,
        Store.open(str(store)),
        checkpoint,
        TargetGuard.of(target),
        placement,
        lambda: None,
        lambda _event: None,
    )


def generated(context: Context, shards: Sequence[Sequence[Prompt]]) -> StageResult:
    """The stage's output for these shards of prompts."""

    def body(workspace: Workspace) -> dict[str, Any]:
        names = [f"train-{number:05d}.jsonl" for number in range(len(shards))]
        with workspace.scratch() as scratch:
            for name, prompts in zip(names, shards, strict=True):
                write_prompts(scratch / name, list(prompts))
                workspace.put(name, scratch / name)
        return {"num_train": sum(map(len, shards)), "train_shards": names}

    inspected = Plan("inspect", {}, 1).run(context, body)
    return generate.run(context, generate.plan(context, "0" * 64), inspected)


def sample_files(result: StageResult) -> dict[str, bytes]:
    names = [record.name for record in result.artifact.files if record.name.startswith("samples-")]
    return {name: result.artifact.local(name).read_bytes() for name in names}


def samples_of(result: StageResult) -> list[Sample]:
    rows = [json.loads(line) for text in sample_files(result).values() for line in text.splitlines()]
    return [
        Sample(row["id"], row["domain"], tuple(row["input_ids"]), tuple((s, e) for s, e in row["spans"]))
        for row in rows
    ]
