"""Extraction against the bare forward, and against the straightforward way: time, bytes and memory.

    python benchmarks/extract_throughput.py TARGET SAMPLES.jsonl [--out FILE.json]

SAMPLES.jsonl: prompts with the target's own answers, a shard that stage `generate` wrote. On the same
samples, in turns, in one process, on one thread:

- ours: `ExtractWorker.work`, all of it: reading the samples (sha256 checked), batches, features, the
  shard written, reopened and checked, put into the store (sha256, fsync);
- the bare forward of the same layers at the same batches: nothing kept, nothing written;
- the straightforward way: `output_hidden_states=True` with full logits, one sample at a time,
  `torch.save` for each.

Memory: the worker's peak resident memory above the loaded model's, in a fresh process, against that of
one batch: the largest batch's forward with its features kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from machine import describe

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import read_samples, write_samples
from dflash_core.features.extraction import extract
from dflash_core.features.token_batches import loss_mask, padded_ids, token_batches
from dflash_core.models.target import Target
from dflash_core.store.artifacts import Artifact, Store, Workspace
from dflash_core.store.attempt import Attempt
from dflash_core.types import Sample
from pipelines.config import RealignConfig
from pipelines.placement import Machine, place
from pipelines.telemetry import peak_rss_mb, reset_peak_rss
from pipelines.workers import ExtractWorker

_MEMORY_BATCHES = 4
"""Batches of the shard that the worker's memory is measured on, about."""
BATCHING = {"batch_tokens": 4096, "chunk_tokens": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--tokens", type=int, default=4_000, help="tokens of the timed shard, about")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 14, 20, 27])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = [pool.apply(_memory, (vars(options), part)) for part in ("one batch", "worker")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bench = Bench(options.target, options.samples, options.tokens, options.layers, Path(folder), stack)
        rows = bench.rounds(options.rounds)
        sizes = {storage: bench.size(storage) for storage in ("bf16", "compact")}
    numbers = bench.num_tokens * len(options.layers) * bench.worker.meta.hidden_size * 2
    ratios = {
        name: [row[name] / row["ours"] for row in rows] for name in ("bare forward", "straightforward way")
    }
    result = {
        "command": "python benchmarks/extract_throughput.py TARGET SAMPLES.jsonl",
        "machine": describe(),
        "samples": len(bench.samples),
        "tokens": bench.num_tokens,
        "layers": options.layers,
        "seconds": {name: statistics.median(row[name] for row in rows) for name in rows[0]},
        "ours_over_bare_forward": _spread(ratios["bare forward"]),
        "ours_over_straightforward": _spread(ratios["straightforward way"]),
        "bytes_over_numbers": sizes["bf16"] / numbers,
        "compact_over_bf16": sizes["compact"] / sizes["bf16"],
        "memory_mb": {"model": memory[0][0], "one_batch": memory[0][1], "worker": memory[1][1]},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def _spread(ratios: list[float]) -> dict[str, float]:
    """Throughput of ours as a multiple of the other's, round by round."""
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


class Bench:
    """One shard of samples in a store, and the three ways to extract it."""

    def __init__(
        self, path: Path, file: Path, tokens: int, layers: list[int], folder: Path, stack: ExitStack
    ) -> None:
        self.samples = _some(file, tokens)
        self.num_tokens = sum(len(s.input_ids) for s in self.samples)
        self.folder, self.layers = folder, tuple(layers)
        checkpoint = open_checkpoint(path)
        store = Store.open(str(folder / "store"))
        arguments: dict[str, Any] = {
            "checkpoint": checkpoint,
            "guard": TargetGuard.of(path),
            "placement": place(
                RealignConfig(target=str(path), device="cpu"), Machine(1, 0), checkpoint.num_parameters
            ),
            "workspace": _workspace(store, "extract", stack),
            "generated": self._generated(store, stack),
            "batching": BATCHING,
        }
        kept = {"layer_ids": self.layers, "last_hidden": False}
        self.workers = {
            storage: ExtractWorker(**arguments, kept={**kept, "storage": storage})
            for storage in ("bf16", "compact")
        }
        self.worker = self.workers["bf16"]
        self.target: Target = self.worker.target

    def _generated(self, store: Store, stack: ExitStack) -> Artifact:
        lease = stack.enter_context(store.lease("generate"))
        attempt = Attempt(store, lease, "generate", "bench", resumable=False)
        workspace, _ = attempt.begin({})
        write_samples(self.folder / "samples", self.samples)
        workspace.put("samples-00000.jsonl", self.folder / "samples")
        return attempt.commit(workspace, {}, {}, 0.0)

    def rounds(self, count: int) -> list[dict[str, float]]:
        """Seconds of each way, in turns; the first round warms up and is left out."""
        ways = {"ours": self.ours, "bare forward": self.bare, "straightforward way": self.straightforward}
        rows: list[dict[str, float]] = []
        for number in range(count + 1):
            row = {}
            for name in list(ways)[number % 3 :] + list(ways)[: number % 3]:
                began = time.perf_counter()
                ways[name]()
                row[name] = time.perf_counter() - began
            rows.append(row)
            print(row, flush=True)
        return rows[1:]

    def ours(self) -> None:
        self.worker.work({"name": "features-00000.arrow", "samples": ["samples-00000.jsonl"]})

    def bare(self) -> None:
        for batch in token_batches(self.samples, BATCHING["batch_tokens"]):
            self.target.tap(padded_ids(batch), self.layers, lambda *_: None)

    @torch.inference_mode()
    def straightforward(self) -> None:
        folder = self.folder / "each"
        folder.mkdir()
        for number, sample in enumerate(self.samples):
            output = self.target.model(torch.tensor([sample.input_ids]), output_hidden_states=True)
            taps = [output.hidden_states[layer + 1][0] for layer in self.layers]
            torch.save(
                {
                    "input_ids": torch.tensor(sample.input_ids),
                    "loss_mask": loss_mask(sample),
                    "features": torch.cat(taps, dim=-1).to(torch.bfloat16),
                },
                folder / f"{number}.pt",
            )
        shutil.rmtree(folder)

    def size(self, storage: str) -> int:
        task = {"name": f"{storage}.arrow", "samples": ["samples-00000.jsonl"]}
        return int(self.workers[storage].work(task)["bytes"])


def _some(file: Path, tokens: int) -> list[Sample]:
    """The first samples of the file that hold so many tokens, sorted as a worker sorts them."""
    chosen: list[Sample] = []
    for sample in read_samples(file):
        if sum(len(s.input_ids) for s in chosen) >= tokens:
            break
        chosen.append(sample)
    return sorted(chosen, key=lambda s: (len(s.input_ids), s.id))


def _workspace(store: Store, stage: str, stack: ExitStack) -> Workspace:
    lease = stack.enter_context(store.lease(stage))
    return Attempt(store, lease, stage, "bench", resumable=False).begin({})[0]


def _memory(options: dict[str, Any], part: str) -> tuple[int, int]:
    """(the process with its model loaded and used, the peak of `part` above that), in MB."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        tokens = _MEMORY_BATCHES * BATCHING["batch_tokens"]
        bench = Bench(options["target"], options["samples"], tokens, options["layers"], Path(folder), stack)
        bench.target.tap(torch.tensor([[1] * 16]), bench.layers, lambda *_: None)
        reset_peak_rss()
        before = peak_rss_mb()
        if part == "worker":
            bench.ours()
        else:
            largest = max(
                token_batches(bench.samples, BATCHING["batch_tokens"]),
                key=lambda batch: len(batch) * len(batch[-1].input_ids),
            )
            list(extract(bench.target, largest, bench.worker.meta, **BATCHING))
        return round(before), round(peak_rss_mb() - before)


if __name__ == "__main__":
    main()
