"""Taps against transformers' own hidden states, the early stop, and features through a shard and back."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch

from dflash_core.errors import UserError
from dflash_core.features import FeatureMeta, FeatureSet, FeatureShard, extract, token_batches, write_shard
from dflash_core.target import Target
from dflash_core.types import Sample
from tests.dflash_core.small_models import greedy_samples, random_prompt, random_target


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def target(request: pytest.FixtureRequest) -> Target:
    return random_target(request.param, seed=2)


def _hidden_states(target: Target, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """What transformers keeps: hidden_states[i + 1] is the output of layer i."""
    with torch.inference_mode():
        states = target.model(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in layers], dim=-1)


def test_taps_are_the_outputs_of_the_layers_named(target: Target) -> None:
    ids = torch.tensor([random_prompt(17, seed=1), random_prompt(17, seed=2)])
    expected = _hidden_states(target, ids, (0, 2))
    assert torch.equal(target.tap(ids, (0, 2)), expected)
    output = target.forward(ids, layer_ids=(0, 2))
    assert torch.equal(output.features, expected)
    assert torch.allclose(output.logits, target.model(ids).logits)


def test_the_forward_stops_after_the_last_tapped_layer(target: Target) -> None:
    ran: list[int] = []
    handles = [
        layer.register_forward_pre_hook(lambda *_args, index=index: ran.append(index))
        for index, layer in enumerate(target.layers)
    ]
    try:
        target.tap(torch.tensor([random_prompt(5, seed=0)]), (0, 1))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1]


def test_an_error_inside_a_forward_leaves_no_tap_behind(target: Target) -> None:
    with pytest.raises(IndexError):
        target.tap(torch.tensor([[10**6]]), (0, 1))
    assert torch.isfinite(target.forward(torch.tensor([[1, 2]])).logits).all()


def test_batched_features_equal_those_of_each_sample_alone(target: Target, tmp_path: Path) -> None:
    samples = [
        Sample(
            str(i),
            "test",
            tuple(random_prompt(length, seed=i)),
            ((1, 2), (3, length)) if length > 3 else ((1, 3),),
        )
        for i, length in enumerate((3, 9, 9, 14, 40))
    ]
    layers = (0, 1, 2)
    meta = FeatureMeta("a" * 64, layers, target.hidden_size)
    write_shard(tmp_path / "s.arrow", meta, extract(target, samples, layers, batch_tokens=30))
    shard = FeatureShard(tmp_path / "s.arrow")
    assert len(shard) == 5
    assert shard.lengths() == [3, 9, 9, 14, 40]
    for row, sample in zip((shard[i] for i in range(5)), samples, strict=True):
        assert row.sample == sample
        alone = _hidden_states(target, torch.tensor([sample.input_ids]), layers)[0]
        assert row.features.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits of mantissa.
        assert (row.features.float() - alone).abs().max() <= alone.abs().max() / 128


def test_shards_are_what_datasets_reads(target: Target, tmp_path: Path) -> None:
    samples = greedy_samples(target, count=3, new_tokens=6)
    meta = FeatureMeta("a" * 64, (1,), target.hidden_size)
    path = tmp_path / "s.arrow"
    write_shard(path, meta, extract(target, samples, (1,), batch_tokens=64))
    dataset = datasets.Dataset.from_file(str(path))
    assert dataset.column_names == ["id", "domain", "input_ids", "loss_mask", "features"]
    assert [i for i, spoken in enumerate(dataset[1]["loss_mask"]) if spoken] == list(
        range(*samples[1].spans[0])
    )
    assert dataset[1]["input_ids"] == list(samples[1].input_ids)
    assert len(dataset[1]["features"]) == len(samples[1].input_ids) * target.hidden_size


def test_shards_of_different_targets_do_not_mix(target: Target, tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        meta = FeatureMeta(name * 64, (1,), target.hidden_size)
        path = tmp_path / f"{name}.arrow"
        samples = greedy_samples(target, count=2, new_tokens=4)
        write_shard(path, meta, extract(target, samples, (1,), batch_tokens=64))
        paths.append(path)
    with pytest.raises(UserError, match=r"b\.arrow"):
        FeatureSet(paths)
    assert len(FeatureSet(paths[:1])) == 2


def test_a_damaged_shard_is_named(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    meta = FeatureMeta("a" * 64, (1,), target.hidden_size)
    samples = greedy_samples(target, count=2, new_tokens=4)
    write_shard(path, meta, extract(target, samples, (1,), batch_tokens=64))
    data = path.read_bytes()
    for cut in (0, 10, len(data) // 2, len(data) - 20):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"s\.arrow"):
            FeatureShard(path)


def test_batches_keep_to_the_budget() -> None:
    samples = [Sample(str(n), "test", (0,) * n, ()) for n in (1, 2, 3, 50, 3, 2)]
    batches = list(token_batches(samples, 12))
    assert [s for batch in batches for s in batch] == samples
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(len(s.input_ids) for s in batch) <= 12
