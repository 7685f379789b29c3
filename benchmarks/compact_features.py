"""What compact storage costs: rounding errors on real hidden states, and τ of drafters trained on them.

    python benchmarks/compact_features.py TARGET SAMPLES.jsonl GATE.jsonl [--steps 160] [--out FILE.json]

SAMPLES.jsonl: prompts with the target's own answers, a shard that stage `generate` wrote. Errors are given
for float8_e4m3fn (what is stored) and int8 under the same scale per token and tap, as the error's RMS over
each channel's own standard deviation: what a linear layer that can weigh channels gets to see. Then, for
each seed, two drafters that differ in nothing but the storage of what they train on decode the gate prompts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import Tensor
from transformers import AutoTokenizer

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.mask_token import choose_mask_token
from dflash_core.corpus.samples import read_samples
from dflash_core.decoding.acceptance import tau
from dflash_core.decoding.evaluation import DecodeSettings, evaluate_prompt
from dflash_core.decoding.statistics import bootstrap_ratio
from dflash_core.features.compact import decode, encode
from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.features.feature_writer import FeatureBatch, write_shard
from dflash_core.models.drafter import Drafter, new_drafter
from dflash_core.models.drafter_config import DrafterConfig, config_for_target
from dflash_core.models.target import Target, load_target
from dflash_core.models.target_weights import TargetWeights
from dflash_core.prompts.prompt_files import load_prompts
from dflash_core.training.objective import Objective, default_gamma
from dflash_core.training.trainer import Trainer, TrainOptions
from dflash_core.types import AcceptanceReport, Checkpoint, Prompt

STORAGES = ("bf16", "compact")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("gate", type=Path)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(options.target)
    target = load_target(options.target)
    config = config_for_target(
        checkpoint.config, mask_token_id=choose_mask_token(checkpoint).id, block_size=8, num_layers=2
    )
    prompts = load_prompts(options.gate)
    prompts = prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]
    with tempfile.TemporaryDirectory() as folder:
        rows, batches = _shards(target, checkpoint, config, options.samples, Path(folder))
        errors = {name: rounding(batches, how) for name, how in (("float8_e4m3fn", _float8), ("int8", _int8))}
        print(json.dumps(errors, indent=1), flush=True)
        results = []
        for seed in options.seeds:
            reports = {}
            for storage in STORAGES:
                drafter = _train(rows[storage], target, options.target, config, options.steps, seed)
                reports[storage] = _decode(
                    target, drafter, prompts, checkpoint, options.max_new_tokens, config.block_size
                )
                print(seed, storage, tau(reports[storage]), flush=True)
            ratio = bootstrap_ratio(reports["compact"], reports["bf16"])
            taus = {storage: tau(report) for storage, report in reports.items()}
            results.append({"seed": seed, "tau": taus, "compact_over_bf16": asdict(ratio)})
    result = {
        "command": "python benchmarks/compact_features.py TARGET SAMPLES.jsonl GATE.jsonl"
        f" --steps {options.steps} --prompts {options.prompts} --max-new-tokens {options.max_new_tokens}",
        "machine": describe(),
        "model": {"hidden": checkpoint.config.hidden_size, "layers": checkpoint.config.num_layers},
        "target_layer_ids": config.target_layer_ids,
        "training_tokens": sum(rows["bf16"].lengths()),
        "rounding_error_over_channel_std": errors,
        "drafters": results,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _shards(
    target: Target, checkpoint: Checkpoint, config: DrafterConfig, file: Path, folder: Path
) -> tuple[dict[str, FeatureSet], list[FeatureBatch]]:
    samples = sorted(read_samples(file), key=lambda s: (len(s.input_ids), s.id))
    rows = {}
    batches: list[FeatureBatch] = []
    for storage in STORAGES:
        meta = FeatureMeta(checkpoint.fingerprint, config.target_layer_ids, target.hidden_size, storage)
        batches = batches or list(extract(target, samples, meta, batch_tokens=4096))
        write_shard(folder / storage, meta, batches)
        rows[storage] = FeatureSet([folder / storage])
    return rows, batches


def rounding(batches: list[FeatureBatch], how: Any) -> dict[str, list[float]]:
    """RMS of the error over each channel's standard deviation, per tap: over all channels, and the worst."""
    values = torch.cat([b.features for b in batches]).float()
    error = (how(values) - values).square().mean(dim=0).sqrt() / values.std(dim=0)
    return {
        "mean": [round(v, 4) for v in error.mean(dim=-1).tolist()],
        "worst_channel": [round(v, 4) for v in error.amax(dim=-1).tolist()],
    }


def _float8(values: Tensor) -> Tensor:
    return decode(*encode(values)).float()


def _int8(values: Tensor) -> Tensor:
    step = values.abs().amax(dim=-1, keepdim=True) / 127
    return (values / step).round() * step


def _train(
    rows: FeatureSet, target: Target, path: Path, config: DrafterConfig, steps: int, seed: int
) -> Drafter:
    options = TrainOptions(
        steps=steps,
        batch_tokens=1024,
        anchors_per_sequence=16,
        objective=Objective(gamma=default_gamma(config.block_size)),
        learning_rate=6e-4,
        warmup_fraction=0.04,
        clip_norm=1.0,
        weight_decay=0.0,
        seed=seed,
    )
    drafter = new_drafter(config, start=TargetWeights(path), seed=seed)
    trainer = Trainer(drafter, target.embedding_weight, target.head_weight, rows, options)
    trainer.run(lambda _report: None)
    return trainer.drafter.eval().requires_grad_(False)


def _decode(
    target: Target, drafter: Drafter, prompts: list[Prompt], checkpoint: Checkpoint, longest: int, block: int
) -> AcceptanceReport:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True)
    settings = DecodeSettings(longest, 0.0, checkpoint.eos_ids, checkpoint.config.max_positions)
    results = tuple(evaluate_prompt(target, drafter, tokenizer, p, settings) for p in prompts)
    return AcceptanceReport(block, results, "0" * 64, checkpoint.fingerprint, 0.0, longest)


if __name__ == "__main__":
    main()
