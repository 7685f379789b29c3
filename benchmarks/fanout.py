"""Our pool of actors against Ray Data's, and two actors against one: the same worker, tasks and target.

    python benchmarks/fanout.py path/to/target [--out benchmarks/results/fanout.json]

Extraction is what is fanned out: samples of random token ids (a forward pass costs the same whatever they
are), lengths drawn log-normally, actors of one thread each, on a Ray of two CPUs started for this. Three
stages in a row, as in a realignment (other layers are tapped in each), through `pipelines.sharded` and
through `ray.data` with an actor pool over the same task descriptions: in turns, wall seconds to the end of
the third. Then one stage through one actor and through two, both warm, in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import write_samples
from dflash_core.store.artifacts import Artifact, Store, Workspace
from dflash_core.types import Checkpoint, Sample
from pipelines.cluster import connect, disconnect
from pipelines.placement import Placement
from pipelines.pool import release_actors
from pipelines.sharded import work_off
from pipelines.stage import run_stage

STAGE_LAYERS = ((1, 4, 7), (1, 8, 15), (2, 10, 20))
Task = dict[str, Any]
FanOut = Callable[[Workspace, dict[str, Any], list[Task], Placement], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--samples", type=int, default=5, help="in each shard")
    options = parser.parse_args()
    placement = Placement(
        device="cpu", dtype="float32", threads=1, train_threads=1, num_actors=2, min_actors=1,
        cpus_per_actor=0.5, gpus_per_actor=0.0, keep_actors=True, release_idle=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.target, Store.open(folder), options.shards, options.samples)
        connect("local", num_cpus=2)
        results = {
            "realignment": compare(bench, placement, options.rounds),
            "actors": scale(bench, placement, options.rounds),
        }
        disconnect()
    result = {
        "command": f"python benchmarks/fanout.py TARGET --rounds {options.rounds}",
        "target": f"{bench.checkpoint.config.architecture}, {bench.checkpoint.num_parameters:,} parameters",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cpus": 2,
            "torch": torch.__version__,
            "ray": ray.__version__,
        },
        "tasks": {"shards": options.shards, "samples": bench.num_samples, "tokens": bench.num_tokens},
        "results": results,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


class Bench:
    """A target, an artifact of samples, and stages of extraction from it."""

    def __init__(self, target: Path, store: Store, num_shards: int, per_shard: int) -> None:
        path = target.absolute()
        self.store, self.guard = store, TargetGuard.of(path)
        self.checkpoint: Checkpoint = open_checkpoint(path)
        self.num_samples, self.num_tokens, self._number = num_shards * per_shard, 0, 0
        self.samples = self._samples(num_shards, per_shard)
        self.tasks = [
            {"name": f"features-{i:05d}.arrow", "samples": [f"samples-{i:05d}.jsonl"]}
            for i in range(num_shards)
        ]

    def seconds(self, layers: tuple[int, ...], placement: Placement, fan_out: FanOut) -> float:
        """One stage, from its start to its commit."""
        self._number += 1

        def body(workspace: Workspace) -> dict[str, Any]:
            arguments = {
                "checkpoint": self.checkpoint,
                "guard": self.guard,
                "placement": placement,
                "workspace": workspace,
                "generated": self.samples,
                "kept": {"layer_ids": layers},
                "batching": {"batch_tokens": 1024, "chunk_tokens": 1024},
            }
            fan_out(workspace, arguments, self.tasks, placement)
            return {}

        began = time.perf_counter()
        made = run_stage(self.store, "extract", {"number": self._number}, body, code_version=1)
        seconds = time.perf_counter() - began
        assert sum(record.name.endswith(".arrow") for record in made.artifact.files) == len(self.tasks)
        return seconds

    def _samples(self, num_shards: int, per_shard: int) -> Artifact:
        draw = random.Random(0)

        def body(workspace: Workspace) -> dict[str, Any]:
            for shard in range(num_shards):
                samples = [self._sample(draw, f"{shard}-{i}") for i in range(per_shard)]
                self.num_tokens += sum(len(sample.input_ids) for sample in samples)
                with workspace.scratch() as scratch:
                    write_samples(scratch / "samples", samples)
                    workspace.put(f"samples-{shard:05d}.jsonl", scratch / "samples")
            return {}

        return run_stage(self.store, "generate", {}, body, code_version=1).artifact

    def _sample(self, draw: random.Random, name: str) -> Sample:
        length = min(1024, max(32, round(draw.lognormvariate(5.3, 0.6))))
        vocabulary = self.checkpoint.config.vocab_size
        ids = tuple(draw.randrange(vocabulary) for _ in range(length))
        return Sample(name, "random", ids, ((length // 4, length),))


def ours(workspace: Workspace, arguments: dict[str, Any], tasks: list[Task], placement: Placement) -> None:
    work_off(workspace, "ExtractWorker", arguments, tasks, placement, lambda: None, lambda _row, _fresh: None)


class DataWorker:
    """The same worker as Ray Data calls it."""

    def __init__(self, **arguments: Any) -> None:
        from pipelines.workers import ExtractWorker

        self.worker = ExtractWorker(**arguments)

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        return {"row": json.dumps(self.worker(json.loads(row["task"])))}


def ray_data(
    _workspace: Workspace, arguments: dict[str, Any], tasks: list[Task], placement: Placement
) -> None:
    items = [{"task": json.dumps(task)} for task in tasks]
    rows = ray.data.from_items(items, override_num_blocks=len(items)).map(
        DataWorker,
        fn_constructor_kwargs=arguments,
        compute=ray.data.ActorPoolStrategy(size=placement.num_actors),
        num_cpus=placement.cpus_per_actor,
    )
    assert sum(1 for _ in rows.iter_rows()) == len(tasks)


def compare(bench: Bench, placement: Placement, rounds: int) -> dict[str, Any]:
    """Three stages in a row through either; the pool's actors begin anew with each round."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    found: dict[str, list[list[float]]] = {"ours": [], "ray_data": []}
    for _ in range(rounds):
        release_actors()
        found["ours"].append([bench.seconds(layers, placement, ours) for layers in STAGE_LAYERS])
        release_actors()
        found["ray_data"].append([bench.seconds(layers, placement, ray_data) for layers in STAGE_LAYERS])
    pairs = zip(found["ray_data"], found["ours"], strict=True)
    ratios = [sum(theirs) / sum(mine) for theirs, mine in pairs]
    return {
        "stage_seconds": found,
        "ray_data_over_ours": statistics.median(ratios),
        "ratios": ratios,
    }


def scale(bench: Bench, placement: Placement, rounds: int) -> dict[str, Any]:
    """One stage through one warm actor and through two warm actors, and how many times faster two are."""
    bench.seconds(STAGE_LAYERS[0], placement, ours)
    found: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for count, seconds in found.items():
            some = replace(placement, num_actors=count)
            seconds.append(bench.seconds(STAGE_LAYERS[-1], some, ours))
    ratios = [one / two for one, two in zip(found[1], found[2], strict=True)]
    return {"seconds": found, "two_over_one": statistics.median(ratios), "ratios": ratios}


if __name__ == "__main__":
    main()
