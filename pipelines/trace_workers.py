"""What runs inside the actors of stage `traces`: they need the target's tokenizer, not the target."""

from __future__ import annotations

import time

from dflash_core.checkpoints.checkpoint import load_tokenizer
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import write_samples
from dflash_core.corpus.trace_rows import read_trace_row
from dflash_core.corpus.trace_samples import TraceRenderer
from dflash_core.store.artifacts import Artifact, Workspace
from dflash_core.types import Checkpoint
from pipelines.sharded import Row, ShardWorker


class TraceWorker(ShardWorker):
    """Turns one shard of traces into one shard of samples per task."""

    def __init__(
        self, checkpoint: Checkpoint, guard: TargetGuard, workspace: Workspace, drawn: Artifact
    ) -> None:
        self.checkpoint, self.guard = checkpoint, guard
        self.workspace, self.drawn = workspace, drawn
        self.tokenizer = load_tokenizer(checkpoint)

    def work(self, task: Row) -> Row:
        """Task: {"name", "traces": file of `drawn`}."""
        began = time.perf_counter()
        renderer = TraceRenderer(self.checkpoint, self.tokenizer)
        with self.drawn.local(task["traces"]).open(encoding="utf-8") as stream:
            traces = [read_trace_row(line) for line in stream]
        samples = list(renderer.samples(traces))
        with self.workspace.scratch() as scratch:
            write_samples(scratch / "samples", samples)
            self.workspace.put(task["name"], scratch / "samples")
        return {
            "traces": len(traces),
            "samples": len(samples),
            "tokens": sum(sample.num_supervised for sample in samples),
            "left_out": dict(renderer.left_out),
            "compared": renderer.num_compared,
            "mismatched": renderer.num_mismatched,
            "first_mismatch": renderer.first_mismatch,
            "seconds": time.perf_counter() - began,
        }
