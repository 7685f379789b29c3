"""Taps against transformers' own hidden states, the early stop, and long samples in chunks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from dflash_core.errors import UserError
from dflash_core.generation.row_cache import RowCache
from dflash_core.models.target import Target, chunks, load_target
from tests.dflash_core.small_models import random_prompt, random_target, tapped


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
    assert torch.equal(tapped(target, ids, (0, 2)), expected)
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
        tapped(target, torch.tensor([random_prompt(5, seed=0)]), (0, 1))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == [0, 1]


def test_an_error_inside_a_forward_leaves_no_tap_behind(target: Target) -> None:
    with pytest.raises(IndexError):
        tapped(target, torch.tensor([[10**6]]), (0, 1))
    assert torch.isfinite(target.forward(torch.tensor([[1, 2]])).logits).all()


@pytest.mark.parametrize("chunk", [1, 7, 16, 40, 64])
def test_chunks_through_the_cache_equal_the_whole_forward(target: Target, chunk: int) -> None:
    ids = torch.tensor([random_prompt(40, seed=1), random_prompt(40, seed=2)])
    whole = _hidden_states(target, ids, (0, 2))
    assert (tapped(target, ids, (0, 2), chunk) - whole).abs().max() <= 1e-5 * whole.abs().max()


def _layered(layer_types: list[str], **rope: object) -> Target:
    """A Qwen3 whose layers are of these kinds, with a window of 6."""
    config = copy.deepcopy(random_target("qwen3", seed=2).model.config)
    config.layer_types, config.sliding_window, config.use_sliding_window = layer_types, 6, True
    config.rope_parameters = {**config.rope_parameters, **rope}
    torch.manual_seed(5)
    return Target(Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa").eval())


_FULL, _SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "layer_types",
    [
        [_SLIDING] * 4,
        [_FULL, _SLIDING, _FULL, _SLIDING],
        # The first full layer comes after the last tap and never runs.
        [_SLIDING, _SLIDING, _SLIDING, _FULL],
    ],
)
@pytest.mark.parametrize("chunk", [3, 6, 11])
def test_sliding_windows_see_as_far_in_chunks(layer_types: list[str], chunk: int) -> None:
    target = _layered(layer_types)
    ids = torch.tensor([random_prompt(40, seed=3)])
    whole = _hidden_states(target, ids, (0, 2))
    assert (whole - _hidden_states(_layered([_FULL] * 4), ids, (0, 2))).abs().max() > 1e-2
    assert (tapped(target, ids, (0, 2), chunk) - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_frequencies_that_depend_on_the_length_keep_a_sample_whole() -> None:
    target = _layered([_FULL] * 4, rope_type="dynamic", factor=2.0)
    target.model.config.max_position_embeddings = 16
    ids = torch.tensor([random_prompt(40, seed=3)])
    assert torch.equal(tapped(target, ids, (0, 2), 8), _hidden_states(target, ids, (0, 2)))


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_last_hidden_state_gives_the_logits_through_the_head(target: Target, chunk: int | None) -> None:
    """And no logits are made on the way."""
    ids = torch.tensor([random_prompt(17, seed=1)])
    pieces: list[Tensor] = []
    heads: list[int] = []
    handle = target.model.lm_head.register_forward_hook(lambda *_: heads.append(1))
    target.tap(
        ids,
        (1,),
        lambda layer, _begin, hidden: pieces.append(hidden) if layer == target.num_layers else None,
        chunk_tokens=chunk,
        last_hidden=True,
    )
    handle.remove()
    assert not heads
    logits = torch.cat(pieces, dim=1) @ target.head_weight.T
    expected = target.forward(ids).logits
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (9, 4), (65_536, 4096), (65_536, 100)])
def test_chunks_cover_everything_and_their_masks_stay_small(length: int, chunk: int) -> None:
    ranges = list(chunks(length, chunk))
    assert [i for begin, end in ranges for i in range(begin, end)] == list(range(length))
    assert all(end - begin <= chunk and (end - begin) * end <= 1 << 25 for begin, end in ranges)


def test_a_target_in_several_places_gives_the_same(tmp_path: Path) -> None:
    """accelerate's real hooks, as on several GPUs, with layers that are fetched from disk in between."""
    accelerate = pytest.importorskip("accelerate")
    whole = random_target(seed=2)
    parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(whole.num_layers)}
    model = accelerate.dispatch_model(
        random_target(seed=2).model, device_map=parts | layers, offload_dir=tmp_path, main_device="cpu"
    )
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    spread = Target(model)
    ids = torch.tensor([random_prompt(40, seed=1)])
    for chunk in (None, 7):
        assert torch.equal(tapped(spread, ids, (0, 1, 2), chunk), tapped(whole, ids, (0, 1, 2), chunk))
    ours, expected = (t.forward(ids, layer_ids=(1, 3)) for t in (spread, whole))
    assert torch.equal(ours.logits, expected.logits)
    assert torch.equal(ours.features, expected.features)
    by_rows = [t.forward_rows(ids, _new_rows(t), layer_ids=(1, 3)) for t in (spread, whole)]
    assert torch.equal(by_rows[0].logits, by_rows[1].logits)
    assert torch.equal(by_rows[0].features, by_rows[1].features)


def _new_rows(target: Target) -> RowCache:
    cache = target.new_rows()
    cache.add_rows(1)
    return cache


def test_a_checkpoint_loads_spread(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = random_target(seed=2)
    whole.model.save_pretrained(tmp_path)
    ids = torch.tensor([random_prompt(17, seed=1)])
    assert torch.equal(tapped(load_target(tmp_path, spread=True), ids, (0, 2)), tapped(whole, ids, (0, 2)))


def test_spreading_without_accelerate_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_core.models.target.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"gpus-per-actor.*spread"):
        load_target(tmp_path, spread=True)
