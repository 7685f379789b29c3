"""Memory of one sample of 64K tokens, in chunks and whole: peak resident memory above what was there before.

    python benchmarks/long_context.py [--tokens 65536] [--out FILE.json]

A small random Qwen3 (2 layers, hidden 256, intermediate 3,072, one attention head of width 32), fp32, one
thread, each way in a process of its own. The features themselves, 64 MB at 64K, are part of both peaks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
from machine import describe
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.models.target import Target
from dflash_core.types import Sample
from pipelines.telemetry import peak_rss_mb, reset_peak_rss

HIDDEN = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096, 1024, 0], help="0: whole")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        rows = [pool.apply(measure, (options.tokens, chunk or None)) for chunk in options.chunks]
    result = {
        "command": "python benchmarks/long_context.py",
        "machine": describe(),
        "tokens": options.tokens,
        "results": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def measure(tokens: int, chunk_tokens: int | None) -> dict[str, Any]:
    """One extraction; its peak in MB above the model's and the process's own."""
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=HIDDEN,
        intermediate_size=12 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=tokens,
    )
    torch.manual_seed(0)
    target = Target(Qwen3ForCausalLM(config).eval())
    meta = FeatureMeta("0" * 64, (0, 1), HIDDEN)
    ids = torch.randint(0, 512, (tokens,)).tolist()
    list(extract(target, [Sample("warm-up", "d", tuple(ids[:256]), ())], meta, batch_tokens=4096))
    samples = [Sample("long", "d", tuple(ids), ())]
    reset_peak_rss()
    before = peak_rss_mb()
    (batch,) = extract(target, samples, meta, batch_tokens=4096, chunk_tokens=chunk_tokens)
    return {
        "chunk_tokens": chunk_tokens,
        "peak_mb": round(peak_rss_mb() - before),
        "features_mb": round(batch.features.numel() * 2 / 1e6),
    }


if __name__ == "__main__":
    main()
