"""The drafter's config: read, written, checked, and its defaults against the published package's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.errors import UserError
from dflash_core.models.drafter import load_drafter, new_drafter, save_drafter
from dflash_core.models.drafter_config import DrafterConfig, read_drafter_config, uniform_layer_ids
from dflash_core.models.target_weights import TargetWeights
from tests.dflash_core.small_models import drafter_config, random_target


@pytest.fixture
def config() -> DrafterConfig:
    return drafter_config(random_target())


def test_what_is_written_is_read_back(config: DrafterConfig, tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    changed = drafter_config(
        random_target(),
        layer_types=("sliding_attention",) * 2,
        sliding_window=7,
        is_causal=False,
        rope_parameters=scaled,
    )
    for each in (config, changed):
        (tmp_path / "config.json").write_text(json.dumps(each.to_json()))
        assert read_drafter_config(tmp_path) == each


def test_the_layout_of_transformers_4_is_read(config: DrafterConfig, tmp_path: Path) -> None:
    data = config.to_json()
    del data["rope_parameters"], data["layer_types"]
    data["dflash_config"]["block_size"] = data.pop("block_size")
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert read_drafter_config(tmp_path) == config


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size": 1}, "--drafter.block-size"),
        ({"target_layer_ids": (0, 3)}, "out of range"),
        ({"target_layer_ids": (-1, 1)}, "out of range"),
        ({"target_layer_ids": (1, 1)}, "distinct"),
        ({"target_layer_ids": ()}, "no target layer"),
        ({"mask_token_id": 97}, "--mask-token-id"),
        ({"num_kv_heads": 3}, "key-value heads"),
        ({"layer_types": ("full_attention",)}, "--drafter.layer-types"),
        ({"layer_types": ("full_attention", "strange")}, "strange"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "--drafter.sliding-window"),
    ],
)
def test_what_engines_would_choke_on_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        drafter_config(random_target(), **change)


@pytest.mark.parametrize("missing", ["hidden_size", "num_target_layers", "mask_token_id", "vocab_size"])
def test_a_missing_key_is_named(config: DrafterConfig, missing: str, tmp_path: Path) -> None:
    data = config.to_json()
    data.pop(missing, None)
    data["dflash_config"].pop(missing, None)
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=missing):
        read_drafter_config(tmp_path)


def test_uniform_layers_are_those_of_the_published_package() -> None:
    reference = pytest.importorskip("dflash.model")
    for layers in range(8, 65):
        for taps in (1, 2, 3, 5):
            expected = sorted(set(reference.build_target_layer_ids(layers, taps)))
            assert list(uniform_layer_ids(layers, taps)) == expected


def test_shallow_targets_get_fewer_taps_and_never_the_last_layer() -> None:
    for layers in range(2, 8):
        ids = uniform_layer_ids(layers, 5)
        assert ids and ids == tuple(sorted(set(ids)))
        assert ids[0] >= 0 and ids[-1] <= layers - 2


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_a_new_drafter_begins_as_the_targets_own_layers(family: str, tmp_path: Path) -> None:
    target = random_target(family, layers=6)
    target.model.save_pretrained(tmp_path / "target", max_shard_size="30KB")
    weights = TargetWeights(tmp_path / "target")
    assert torch.equal(weights.embedding(), target.embedding_weight)
    assert torch.equal(weights.head(), target.head_weight)
    drafter = new_drafter(drafter_config(target), start=weights, seed=0)
    last = target.layers[5].state_dict()
    mine = drafter.layers[1].state_dict()
    for name in ("self_attn.q_proj.weight", "mlp.down_proj.weight", "input_layernorm.weight"):
        assert torch.equal(mine[name], last[name])
    assert ("self_attn.q_norm.weight" in last) == (family == "qwen3")


def test_saving_is_atomic_and_loading_is_exact(config: DrafterConfig, tmp_path: Path) -> None:
    drafter = new_drafter(config, start=None, seed=3)
    save_drafter(drafter, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    again = load_drafter(tmp_path)
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    save_drafter(drafter, tmp_path)
    with pytest.raises(UserError, match="NaN"):
        load_drafter(tmp_path)
