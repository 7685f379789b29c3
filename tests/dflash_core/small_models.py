"""Small real models for the tests of the core: random targets, and drafters trained on them for real."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.features.feature_writer import write_shard
from dflash_core.generation.batched_decoding import BatchedEngine
from dflash_core.generation.engine import GenerationSettings, Request
from dflash_core.models.drafter import Drafter, new_drafter
from dflash_core.models.drafter_config import DrafterConfig
from dflash_core.models.target import Target
from dflash_core.training.objective import Objective
from dflash_core.training.schedules import Schedule
from dflash_core.training.trainer import Trainer, TrainOptions
from dflash_core.types import Sample

VOCAB = 97
_FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def random_target(
    family: str = "qwen3",
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 32,
    max_positions: int = 256,
    **changes: object,
) -> Target:
    """A target with random weights, large enough for its greedy output to depend on the context."""
    torch.manual_seed(seed)
    config_class, model_class = _FAMILIES[family]
    extra = {**({} if family == "qwen2" else {"head_dim": hidden // 4}), **changes}
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=max_positions,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **extra,
    )
    return Target(model_class(config).eval())


def sliding_target(*, window: int, seed: int = 0) -> Target:
    """A target every other layer of which sees no more than the last `window` tokens."""
    kinds = ["full_attention", "sliding_attention"] * 2
    return random_target(
        "qwen3", seed=seed, use_sliding_window=True, sliding_window=window, layer_types=kinds
    )


def drafter_config(target: Target, **changes: object) -> DrafterConfig:
    """A two-layer drafter for `random_target`'s models."""
    width = target.hidden_size
    values: dict[str, object] = {
        "block_size": 4,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": (0, 1, 2),
        "num_target_layers": target.num_layers,
        "hidden_size": width,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": width // 4,
        "intermediate_size": 2 * width,
        "vocab_size": VOCAB,
        "max_positions": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ("full_attention", "full_attention"),
    }
    return DrafterConfig(**{**values, **changes})  # type: ignore[arg-type]


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids, the mask's row never among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 1, (length,), generator=generator).tolist()


def greedy_samples(
    target: Target, *, count: int = 16, prompt_length: int = 8, new_tokens: int = 32
) -> list[Sample]:
    """The target's own greedy answers to random prompts."""
    prompts = [random_prompt(prompt_length, seed) for seed in range(count)]
    engine = BatchedEngine(target, GenerationSettings(new_tokens, frozenset()), batch_tokens=4096)
    engine.submit(Request(str(i), tuple(prompt), seed=0) for i, prompt in enumerate(prompts))
    answers = {answer.id: answer.token_ids for answer in engine.answers()}
    return [
        Sample(i, "test", (*prompt, *answers[i]), ((prompt_length, prompt_length + len(answers[i])),))
        for i, prompt in ((str(i), prompt) for i, prompt in enumerate(prompts))
    ]


def tapped(
    target: Target, ids: torch.Tensor, layers: tuple[int, ...], chunk_tokens: int | None = None
) -> torch.Tensor:
    """Hidden states [batch, tokens, taps x hidden] after `layers`, as `Target.tap` gives them."""
    pieces: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    target.tap(
        ids, layers, lambda layer, _begin, hidden: pieces[layer].append(hidden), chunk_tokens=chunk_tokens
    )
    return torch.cat([torch.cat(pieces[layer], dim=1) for layer in layers], dim=-1)


def train_options(config: DrafterConfig, *, steps: int, **changes: object) -> TrainOptions:
    """Options for a run of a few seconds."""
    values: dict[str, object] = {
        "schedule": Schedule("cosine", steps, warmup_fraction=0.05, decay_fraction=0.2),
        "batch_tokens": 160,
        "anchors_per_sequence": 12,
        "objective": Objective(),
        "learning_rate": 3e-3,
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "seed": 0,
    }
    return TrainOptions(**{**values, **changes})  # type: ignore[arg-type]


def feature_set(
    target: Target, config: DrafterConfig, samples: list[Sample], path: Path, *, last_hidden: bool = False
) -> FeatureSet:
    """Features of the samples, written to a real shard and read back."""
    taps, width = config.target_layer_ids, config.hidden_size
    meta = FeatureMeta("0" * 64, taps, width, last_hidden=last_hidden)
    write_shard(path, meta, extract(target, samples, meta, batch_tokens=512))
    return FeatureSet([path])


def trained_drafter(target: Target, config: DrafterConfig, folder: Path, *, steps: int = 60) -> Drafter:
    """A drafter that has learned some of the target's answers, so that it gets drafts accepted."""
    rows = feature_set(target, config, greedy_samples(target), folder / "features.arrow")
    trainer = Trainer(
        new_drafter(config, start=None, seed=0),
        target.embedding_weight,
        target.head_weight,
        rows,
        train_options(config, steps=steps),
    )
    trainer.run(lambda report: None)
    return trainer.drafter.eval().requires_grad_(False)
