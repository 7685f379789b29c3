"""What runs inside the actors of stage `generate`: a shard of prompts is answered, in whatever order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from dflash_core.checkpoints.checkpoint import load_tokenizer
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import write_samples
from dflash_core.generation.answering import Answered, answer_prompts
from dflash_core.prompts.prompt_files import load_prompts
from dflash_core.store.artifacts import Artifact, Workspace
from dflash_core.types import Checkpoint, Prompt
from pipelines.engines import EngineOptions, make_engine
from pipelines.placement import Placement
from pipelines.sharded import Row, ShardWorker


class GenerateWorker(ShardWorker):
    """Answers prompts with the target and writes one shard of samples per task."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        guard: TargetGuard,
        placement: Placement,
        workspace: Workspace,
        inspected: Artifact,
        options: EngineOptions,
        seed: int,
    ) -> None:
        self.guard, self.workspace, self.inspected, self.seed = guard, workspace, inspected, seed
        self.engine = make_engine(options, checkpoint, placement)
        self.tokenizer = load_tokenizer(checkpoint)

    def work(self, task: Row) -> Row:
        """Task: {"name", "prompts": file of `inspected`}. Samples are written in the prompts' order."""
        began = time.perf_counter()
        prompts = load_prompts(self.inspected.local(task["prompts"]))
        answered = sorted(
            answer_prompts(self.engine, self.tokenizer, prompts, self.seed), key=lambda a: a.index
        )
        with self.workspace.scratch() as scratch:
            write_samples(scratch / "samples", (s for one in answered for s in one.samples))
            self.workspace.put(task["name"], scratch / "samples")
        domains = count_domains(prompts, answered)
        return {
            "prompts": len(prompts),
            **{key: sum(counts[key] for counts in domains.values()) for key in COUNTS},
            "domains": domains,
            "engines": {self.engine.version: 1},
            "seconds": time.perf_counter() - began,
        }


def count_domains(prompts: list[Prompt], answered: Iterable[Answered]) -> dict[str, dict[str, int]]:
    """Domain -> how many samples, tokens of answers in them, and answers by how they ended."""
    domains: dict[str, Counter[str]] = {}
    for one in answered:
        counts = domains.setdefault(prompts[one.index].domain, Counter(dict.fromkeys(COUNTS, 0)))
        counts["samples"] += len(one.samples)
        counts["tokens"] += sum(sample.num_supervised for sample in one.samples)
        for outcome in one.outcomes:
            counts[outcome] += 1
    return {domain: dict(counts) for domain, counts in sorted(domains.items())}


COUNTS = ("samples", "tokens", "stop", "length", "repetitive")
"""What is counted: samples, tokens of answers in them, and answers; those left out are `repetitive`."""
