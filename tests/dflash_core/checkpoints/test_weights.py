"""Safetensors files and their index: every contradiction is found before a weight is loaded."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.checkpoints.checkpoint import open_checkpoint
from tests.dflash_core import tiny_checkpoints as tiny


def first_shard(folder: Path) -> str:
    return min(path.name for path in folder.glob("model-*.safetensors"))


def test_index_that_names_a_missing_shard(sharded: Path) -> None:
    shard = first_shard(sharded)
    (sharded / shard).unlink()
    assert f"names the shard {shard}, which is missing" in tiny.refusal(sharded)


def test_tensor_in_the_index_but_not_in_its_shard(sharded: Path) -> None:
    with tiny.editing(sharded / "model.safetensors.index.json") as index:
        index["weight_map"]["model.extra.weight"] = first_shard(sharded)
    assert f"model.extra.weight in {first_shard(sharded)}, which lacks it" in tiny.refusal(sharded)


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    with tiny.editing(sharded / "model.safetensors.index.json") as index:
        index["weight_map"]["model.norm.weight"] = first_shard(sharded)
    assert "does not place tensor model.norm.weight" in tiny.refusal(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3, None])
def test_index_that_points_elsewhere(sharded: Path, name: Any) -> None:
    with tiny.editing(sharded / "model.safetensors.index.json") as index:
        index["weight_map"]["model.norm.weight"] = name
    assert re.search(rf"model.norm.weight in {re.escape(repr(name))}", tiny.refusal(sharded))


def test_index_without_a_map_and_shards_without_an_index(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    index.write_text("{}")
    assert "no weight_map" in tiny.refusal(sharded)
    index.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in tiny.refusal(sharded)


def test_both_layouts_at_once(originals: dict[str, Path], sharded: Path) -> None:
    shutil.copy(originals["qwen3"] / "model.safetensors", sharded)
    assert "stale" in tiny.refusal(sharded)


@pytest.mark.parametrize("kept", [0, 5, 8, 100, -1, -1000])
def test_truncated_file(qwen3: Path, kept: int) -> None:
    path = qwen3 / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert re.search(r"model.safetensors is truncated", tiny.refusal(qwen3))


def test_bytes_after_the_last_tensor(qwen3: Path) -> None:
    with (qwen3 / "model.safetensors").open("ab") as stream:
        stream.write(b"junk")
    assert "4 bytes after its last tensor" in tiny.refusal(qwen3)


def test_header_length_out_of_bounds(qwen3: Path) -> None:
    path = qwen3 / "model.safetensors"
    path.write_bytes((200 << 20).to_bytes(8, "little") + bytes(8))
    os.truncate(path, 300 << 20)
    assert "a header of 209,715,200 bytes" in tiny.refusal(qwen3)


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["model.norm.weight"].update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set(data_offsets=[0, 128]), "embed_tokens.weight overlaps"),
        (_set(data_offsets=[1 << 30, (1 << 30) + 128]), "gap"),
        (_set(data_offsets=[-128, 0]), "data_offsets"),
        (_set(data_offsets=[0]), "data_offsets"),
        (_set(data_offsets=None), "data_offsets"),
        (_set(shape=[31]), r"\[31\] takes 124 bytes but spans 128"),
        (_set(shape=[2**60, 2**60]), "shape"),
        (_set(shape="32"), "shape '32'"),
        (_set(dtype="F8_E4M3"), "model.norm.weight is of type 'F8_E4M3'.*unquantized"),
        (_set(dtype=["F32"]), "model.norm.weight is of type"),
        (lambda header: header.update({"model.norm.weight": 3}), "model.norm.weight has no description"),
        (lambda header: header.clear(), "holds no tensor"),
    ],
)
def test_header_that_contradicts_the_file(
    qwen3: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    tiny.edit_header(qwen3 / "model.safetensors", change)
    message = tiny.refusal(qwen3)
    assert re.search(said, message), message


@pytest.mark.parametrize(
    ("source", "value"),
    [("qwen3", np.nan), ("qwen3", -np.inf), ("qwen2", np.nan), ("llama", np.inf), ("llama", np.nan)],
)
def test_numbers_that_are_not_finite(
    originals: dict[str, Path], tmp_path: Path, source: str, value: float
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = tiny.copy(originals[source], tmp_path / "bad")
    name = "model.layers.1.self_attn.v_proj.weight"
    weights = load_file(folder / "model.safetensors")
    weights[name][-1, -1] = torch.tensor(value)
    save_file(weights, folder / "model.safetensors")
    assert re.search(rf"tensor {name} holds NaN or infinity", tiny.refusal(folder))
    assert re.search(rf"tensor {name} holds NaN", tiny.refusal(folder, cache_dir=tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_large_finite_numbers_are_fine_in_every_format(originals: dict[str, Path], tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        folder = tiny.copy(originals["qwen3"], tmp_path / str(dtype))
        weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        weights["model.norm.weight"][:4] = torch.tensor(
            [torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny, -0.0], dtype=dtype
        )
        save_file(weights, folder / "model.safetensors")
        tiny.set_json(folder / "config.json", dtype=None)
        assert f"torch.{open_checkpoint(folder).config.torch_dtype}" == str(dtype)
        weights["model.norm.weight"][7] = float("nan")
        save_file(weights, folder / "model.safetensors")
        assert "model.norm.weight" in tiny.refusal(folder)


def test_a_tied_head_that_differs_from_the_embedding(qwen3: Path) -> None:
    tiny.edit_weights(
        qwen3, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"] * 2})
    )
    assert re.search("lm_head.weight that differs.*tie_word_embeddings", tiny.refusal(qwen3))


def test_tensors_that_the_architecture_does_not_have(qwen3: Path) -> None:
    tiny.edit_weights(qwen3, lambda arrays: arrays.update({"v_head.weight": np.zeros((1, 32), np.float32)}))
    assert "v_head.weight" in tiny.refusal(qwen3)


def test_rotary_buffers_of_old_exports_do_not_count(originals: dict[str, Path], qwen3: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    tiny.edit_weights(qwen3, lambda arrays: arrays.update(buffer))
    assert tiny.print_of(qwen3) == tiny.print_of(originals["qwen3"])
