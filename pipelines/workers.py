"""What runs inside the actors: each loads the target once and works off task after task.

An actor writes its own shard into the stage's workspace and returns a manifest row; tensors never
travel through the object store. torch and transformers are imported here and in nothing that the
driver imports.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from dflash_core.checkpoints.checkpoint import load_tokenizer
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import read_samples
from dflash_core.decoding.evaluation import DecodeSettings, evaluate_prompt
from dflash_core.features.extraction import extract
from dflash_core.features.feature_check import check_shard
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_writer import write_shard
from dflash_core.models.drafter import load_drafter
from dflash_core.models.drafter_config import check_fits
from dflash_core.models.target import Target, load_target
from dflash_core.prompts.prompt_files import load_prompts
from dflash_core.store.artifacts import Artifact, Workspace
from dflash_core.types import Checkpoint
from pipelines.placement import Placement, torch_dtype
from pipelines.sharded import Row, ShardWorker


def start_target(checkpoint: Checkpoint, placement: Placement) -> Target:
    """The target, loaded where the placement says; an actor keeps it from one stage to the next."""
    torch.set_num_threads(placement.threads)
    key = (checkpoint.fingerprint, placement.device, placement.dtype)
    if key not in _loaded:
        _loaded.clear()  # before the next one takes its room
        _loaded[key] = load_target(
            checkpoint.path,
            device=placement.device,
            dtype=torch_dtype(placement.dtype),
            spread=placement.gpus_per_actor > 1,
        )
    return _loaded[key]


_loaded: dict[tuple[str, str, str], Target] = {}
"""At most one."""


class ExtractWorker(ShardWorker):
    """Turns one shard of samples into one Arrow shard of features per task."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        guard: TargetGuard,
        placement: Placement,
        workspace: Workspace,
        generated: Artifact,
        kept: dict[str, Any],
        batching: dict[str, int],
    ) -> None:
        """`kept`: what of each sample, as `FeatureMeta` names it. `batching`: keywords of `extract`."""
        self.guard, self.workspace = guard, workspace
        self.generated, self.batching = generated, batching
        self.target = start_target(checkpoint, placement)
        self.meta = FeatureMeta(checkpoint.fingerprint, hidden_size=checkpoint.config.hidden_size, **kept)

    def work(self, task: Row) -> Row:
        """Task: {"name", "samples": [file, ...]}."""
        began = time.perf_counter()
        unsorted = (sample for name in task["samples"] for sample in read_samples(self.generated.local(name)))
        samples = sorted(unsorted, key=lambda s: (len(s.input_ids), s.id))
        with self.workspace.scratch() as scratch:
            batches = extract(self.target, samples, self.meta, **self.batching)
            tokens = write_shard(scratch / "features", self.meta, batches)
            check_shard(scratch / "features", self.meta, samples)
            record = self.workspace.put(task["name"], scratch / "features")
        return {
            "samples": len(samples),
            "tokens": tokens,
            "bytes": record.num_bytes,
            "seconds": time.perf_counter() - began,
        }


class EvaluateWorker(ShardWorker):
    """Decodes prompts with a drafter and reports what was accepted."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        guard: TargetGuard,
        placement: Placement,
        workspace: Workspace,
        inspected: Artifact,
        drafter: Artifact,
        decoding: dict[str, Any],
        seed: int,
    ) -> None:
        self.guard, self.workspace = guard, workspace
        self.settings = DecodeSettings(
            stop_ids=checkpoint.eos_ids, max_positions=checkpoint.config.max_positions, seed=seed, **decoding
        )
        self.target = start_target(checkpoint, placement)
        self.tokenizer = load_tokenizer(checkpoint)
        self.prompts = load_prompts(inspected.local("gate.jsonl"))
        directory = drafter.local_dir() / "drafter"
        self.drafter = load_drafter(directory, device=placement.device, dtype=torch_dtype(placement.dtype))
        check_fits(self.drafter.config, checkpoint.config, where=str(directory))

    def work(self, task: Row) -> Row:
        """Task: {"name", "prompt": index}. Returns the PromptResult as plain data."""
        prompt = self.prompts[task["prompt"]]
        return asdict(evaluate_prompt(self.target, self.drafter, self.tokenizer, prompt, self.settings))
