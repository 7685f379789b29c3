"""Memory of the driver while it draws, splits, renders and freezes prompts: few of them against many.

    python benchmarks/prompts_memory.py [--sizes 1000 200000] [--out benchmarks/results/prompts_memory.json]

Each size runs the stages `prompts` and `inspect` in a process of its own, as a realignment's driver does:
two JSONL sources mixed by weight, the gate held out of them, every prompt rendered for a tiny target. Memory
is the process's peak resident size, taken anew at each stage; what the imports need is the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TURNS = (20, 120)
"""Words of a prompt, from and to."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 200_000], help="prompts")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(_run(options.run)))
        return
    rows = [_measure(size) for size in options.sizes]
    few, many = rows[0], rows[-1]
    grown = {
        stage: round(
            (many[stage]["peak_mb"] - few[stage]["peak_mb"]) * 2**20 / (many["prompts"] - few["prompts"]), 1
        )
        for stage in ("prompts_stage", "inspect_stage")
    }
    result = {
        "command": "python benchmarks/prompts_memory.py",
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "sizes": rows,
        "bytes_per_further_prompt": grown,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def _measure(size: int) -> dict[str, object]:
    from dflash_core.toy.build import build_tiny_target

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_target(folder / "target", steps=1)
        _write(folder / "a.jsonl", size // 2, seed=1)
        _write(folder / "b.jsonl", size - size // 2, seed=2)
        command = [sys.executable, __file__, "--run", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return {"prompts": size, **json.loads(done.stdout.splitlines()[-1])}


def _write(path: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(5000)]
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            text = " ".join(rng.choices(words, k=rng.randint(*TURNS)))
            stream.write(json.dumps({"prompt": text}) + "\n")


def _run(folder: Path) -> dict[str, object]:
    from pipelines import inspect, prompts
    from pipelines.config import RealignConfig
    from pipelines.prepare import prepare
    from pipelines.telemetry import peak_rss_mb, reset_peak_rss

    config = RealignConfig.model_validate(
        {
            "target": str(folder / "target"),
            "prompts": [f"{folder / 'a.jsonl'}?weight=1", f"{folder / 'b.jsonl'}?weight=1"],
            "store": str(folder / "store"),
            "tracking_uri": f"sqlite:///{folder / 'mlflow.db'}",
            "generate": {"num_prompts": 10_000_000, "max_new_tokens": 64},
        }
    )
    import dflash_core.prompts.prompt_lengths  # noqa: F401 - torch and transformers are no part of what grows

    prepared = prepare(config, lambda _event: None)
    found: dict[str, object] = {}
    stages = {
        "prompts_stage": lambda: prompts.run(prepared.context, prepared.prompts),
        "inspect_stage": lambda: inspect.run(prepared.context, results["prompts_stage"]),
    }
    results: dict = {}
    for name, stage in stages.items():
        reset_peak_rss()
        began, before = time.perf_counter(), peak_rss_mb()
        results[name] = stage()
        found[name] = {
            "seconds": round(time.perf_counter() - began, 1),
            "before_mb": round(before),
            "peak_mb": round(peak_rss_mb(), 1),
        }
    found["num_train"] = results["inspect_stage"].artifact.meta["num_train"]
    return found


if __name__ == "__main__":
    main()
