"""Features of batched samples are those of each sample alone; NaN is named where it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_shards import FeatureShard
from dflash_core.features.feature_writer import write_shard
from dflash_core.features.finite import first_not_finite
from dflash_core.features.token_batches import token_batches
from dflash_core.types import Sample
from tests.dflash_core.small_models import random_prompt, random_target

LAYERS = (2, 0, 1)


def _samples(lengths: tuple[int, ...] = (3, 9, 9, 14, 40)) -> list[Sample]:
    return [Sample(f"s{i}", "d", tuple(random_prompt(n, seed=i)), ((1, n),)) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_batched_features_equal_those_of_each_sample_alone(
    family: str, chunk: int | None, tmp_path: Path
) -> None:
    target = random_target(family, seed=2)
    meta = FeatureMeta("a" * 64, LAYERS, target.hidden_size, last_hidden=True)
    samples = _samples()
    batches = list(extract(target, samples, meta, batch_tokens=30, chunk_tokens=chunk))
    assert [len(b.samples) for b in batches] == [3, 2, 1] or [len(b.samples) for b in batches] == [3, 1, 1]
    write_shard(tmp_path / "s.arrow", meta, batches)
    shard = FeatureShard(tmp_path / "s.arrow")
    for row, sample in zip((shard[i] for i in range(5)), samples, strict=True):
        with torch.inference_mode():
            states = target.model(torch.tensor([sample.input_ids]), output_hidden_states=True).hidden_states
        alone = torch.cat([states[i + 1][0] for i in LAYERS], dim=-1)
        # bfloat16 keeps 8 bits of mantissa.
        assert (row.features.float() - alone).abs().max() <= alone.abs().max() / 256
        assert row.last_hidden is not None
        assert (row.last_hidden.float() - states[-1][0]).abs().max() <= states[-1].abs().max() / 256


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    target = random_target(seed=2)
    meta = FeatureMeta("a" * 64, LAYERS, target.hidden_size)
    for name in ("a", "b"):
        write_shard(tmp_path / name, meta, extract(target, _samples(), meta, batch_tokens=30))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("layer", "words"), [(0, "layer 0 at token 4"), (1, "layer 1 at token 4"), (2, "layer 2 at token 4")]
)
def test_a_number_that_is_not_finite_names_sample_and_layer(layer: int, words: str) -> None:
    """The earliest tapped layer that shows it, whatever the order of the taps."""
    target = random_target(seed=2)
    meta = FeatureMeta("a" * 64, LAYERS, target.hidden_size)

    def poison(_module: torch.nn.Module, _args: object, output: Tensor) -> Tensor:
        spoiled = output.clone()
        spoiled[1, 4] = float("nan")  # the second row of the batch: sample s1
        return spoiled

    handle = target.layers[layer].mlp.register_forward_hook(poison)
    try:
        with pytest.raises(UserError, match=f"sample 's1'.*{words}"):
            list(extract(target, _samples((9, 9)), meta, batch_tokens=30))
    finally:
        handle.remove()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_quick_look_misses_nothing(bad: float) -> None:
    for index in ((0, 0, 0), (3, 2, 96), (6, 1, 40)):
        values = torch.randn(7, 3, 97).to(torch.bfloat16)
        assert first_not_finite(values) is None
        values[index] = bad
        assert first_not_finite(values) == index


def test_batches_keep_to_the_budget() -> None:
    samples = [Sample(str(n), "test", (0,) * n, ()) for n in (1, 2, 3, 50, 3, 2)]
    batches = list(token_batches(samples, 12))
    assert [s for batch in batches for s in batch] == samples
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(s.input_ids) for s in batch) <= 12
