"""How much work a realignment does when the user does not say: sized to the machine and the target.

Three regimes. A *tiny* target (a test, the demo) is done in a minute wherever it runs. On *CPUs* the
work is cut so that the stages together stay well under an hour. On *GPUs* it is the paper's recipe
(arXiv 2602.06036, section 5). What the user gave is never touched.
"""

from __future__ import annotations

import math
from typing import Any

from pipelines.config import RealignConfig, Section

TINY_PARAMETERS = 20_000_000
"""Targets below this are tiny: launching kernels costs more than the arithmetic."""

DEFAULT_MIN_TAU = 1.1
"""The gate's threshold when the user gives none: below it drafting hardly pays for itself."""

Automatic = dict[str, dict[str, Any]]
"""Section -> field -> the value it takes when it is automatic."""


def resolve_budget(
    config: RealignConfig,
    num_parameters: int,
    num_gpus: int,
    num_cpus: int,
    *,
    max_positions: int | None = None,
) -> RealignConfig:
    """`config` with the automatic fields of generate, extract, drafter, train, evaluate and gate filled in.

    num_parameters and max_positions (context length, tokens) are the target's; num_gpus and num_cpus
    are what the cluster or the machine has. Automatic answers take a quarter of the context at most,
    so that prompts of several turns still fit. `generate.num_prompts` stays None on GPUs: all prompts.
    `train.steps` and `train.epochs` exclude each other, so one of the two stays None. Pure.
    """
    on_gpu = config.device == "cuda" or (config.device == "auto" and num_gpus > 0)
    if num_parameters < TINY_PARAMETERS:
        automatic = _tiny()
    elif on_gpu:
        automatic = _gpu(config.train.num_workers)
    else:
        automatic = _cpu(num_parameters, num_cpus)
    if max_positions is not None:
        for name in ("generate", "evaluate"):
            wanted = automatic[name]["max_new_tokens"]
            automatic[name]["max_new_tokens"] = max(2, min(wanted, max_positions // 4))
    if config.drafter.layer_types is not None:
        automatic["drafter"]["num_layers"] = len(config.drafter.layer_types)
    if config.train.steps is not None or config.train.epochs is not None:
        automatic["train"].update(steps=None, epochs=None)
    if config.gate.min_acceptance_rate is None:
        automatic["gate"] = {"min_tau": DEFAULT_MIN_TAU}
    filled = {name: _fill(getattr(config, name), values) for name, values in automatic.items()}
    return config.model_copy(update=filled)


def _fill(section: Section, automatic: dict[str, Any]) -> Section:
    missing = {name: value for name, value in automatic.items() if getattr(section, name) is None}
    return section.model_copy(update=missing)


def _tiny() -> Automatic:
    """About a minute and a half in all for one or two million parameters on two cores.

    Measured there on an idle machine: 0.24 s a training step, 19 s to start Ray Train, 15 s until the first
    actors run, then 1 to 5 s for each of generate, extract and evaluate.
    """
    return {
        "generate": {"num_prompts": 160, "max_new_tokens": 96, "batch_tokens": 8192, "shard_prompts": 40},
        "extract": {"shard_tokens": 2048},
        "drafter": {"num_layers": 2, "block_size": 8},
        "train": {"steps": 160, "batch_tokens": 1024, "anchors_per_sequence": 16},
        "evaluate": {"num_prompts": 40, "max_new_tokens": 64},
    }


def _cpu(num_parameters: int, num_cpus: int) -> Automatic:
    """Meant as half an hour for 135 M parameters on two cores; 46 minutes beside other work were seen.

    Measured there, in fp32: 85 tokens/s decoding at batch 8, 17 tokens/s at batch 1, and 40 anchors/s
    training two layers against a vocabulary of 49 K. All three are taken to grow with
    `speed` = (135 M / parameters) x (cores / 2), and each stage is given its share of time:

    - generate, 5 minutes:   85 x 300 x speed tokens   =    200 x speed answers of 128 tokens
    - train, 10 minutes:     40 x 600 x speed anchors  =    375 x speed steps of 4 answers x 16 anchors
    - evaluate, 4 minutes:   17 x 240 x speed tokens   =     42 x speed answers of 96 tokens, of which
      24 are taken: verifying a block that is mostly rejected costs more than decoding its one token.

    Bounds keep a slow machine's result meaningful and a fast one's job short.
    """
    speed = (135e6 / num_parameters) * (num_cpus / 2)
    num_prompts = _between(32, 200 * speed, 2000)
    return {
        "generate": {
            "num_prompts": num_prompts,
            "max_new_tokens": 128,
            "batch_tokens": 8192,
            "shard_prompts": _even_shards(num_prompts, num_cpus, most=32),
        },
        "extract": {"shard_tokens": 8192},
        "drafter": {"num_layers": 2, "block_size": 8},
        "train": {
            "steps": _between(60, 375 * speed, 2000),
            "batch_tokens": 1024,
            "anchors_per_sequence": 16,
        },
        "evaluate": {"num_prompts": _between(12, 24 * speed, 200), "max_new_tokens": 96},
    }


def _gpu(num_workers: int) -> Automatic:
    """The paper's recipe: 5 layers, block 16, 512 anchors, 6 epochs over answers of up to 3,072 tokens.

    A worker's step is four such conversations. 200 gate prompts resolve a loss of 5 % of τ with 80 %
    power.
    """
    return {
        "generate": {
            "num_prompts": None,
            "max_new_tokens": 2048,
            "batch_tokens": 65_536,
            "shard_prompts": 256,
        },
        "extract": {"shard_tokens": 65_536},
        "drafter": {"num_layers": 5, "block_size": 16},
        "train": {"epochs": 6, "batch_tokens": 4 * 3072 * num_workers, "anchors_per_sequence": 512},
        "evaluate": {"num_prompts": 200, "max_new_tokens": 512},
    }


def _even_shards(num_prompts: int, num_actors: int, *, most: int) -> int:
    """Prompts per shard, `most` at most, so that every actor gets as many shards."""
    rounds = math.ceil(num_prompts / (num_actors * most))
    return math.ceil(num_prompts / (num_actors * rounds))


def _between(least: int, value: float, most: int) -> int:
    return max(least, min(round(value), most))
