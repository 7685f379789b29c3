"""Bad checkpoints: each is refused with one sentence that names what is wrong."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from dflash_core.errors import UserError
from tests.dflash_core import tiny_checkpoints as tiny

# The directory


def test_missing_directory(tmp_path: Path) -> None:
    assert re.search("nowhere does not exist.*org/name", tiny.refusal(tmp_path / "nowhere"))


def test_file_instead_of_directory(qwen3: Path) -> None:
    assert "config.json is a file" in tiny.refusal(qwen3 / "config.json")


def test_a_parent_of_checkpoints_points_to_the_newest(qwen3: Path) -> None:
    assert f"did you mean {qwen3}?" in tiny.refusal(qwen3.parent)


def test_link_out_of_the_directory(qwen3: Path, tmp_path: Path) -> None:
    (qwen3 / "model.safetensors").rename(tmp_path / "secret")
    (qwen3 / "model.safetensors").symlink_to(tmp_path / "secret")
    assert re.search(r"model.safetensors links out of the checkpoint .*secret", tiny.refusal(qwen3))


def test_link_of_a_folder_out_of_the_directory(qwen3: Path) -> None:
    (qwen3 / "additional_chat_templates").symlink_to("/etc")
    assert "additional_chat_templates links out" in tiny.refusal(qwen3)


def test_dangling_and_circular_links(qwen3: Path) -> None:
    (qwen3 / "gone").symlink_to(qwen3 / "nothing")
    assert "nothing, which is missing" in tiny.refusal(qwen3)
    (qwen3 / "gone").unlink()
    (qwen3 / "round").symlink_to(qwen3 / "round")
    assert "round" in tiny.refusal(qwen3)


def test_link_inside_the_directory_is_fine(originals: dict[str, Path], qwen3: Path) -> None:
    (qwen3 / "model.safetensors").rename(qwen3 / "weights.blob")
    (qwen3 / "model.safetensors").symlink_to("weights.blob")
    assert tiny.print_of(qwen3) == tiny.print_of(originals["qwen3"])


def test_a_pipe_in_place_of_a_file_is_refused_not_awaited(qwen3: Path) -> None:
    (qwen3 / "config.json").unlink()
    os.mkfifo(qwen3 / "config.json")
    assert "config.json is not a regular file" in tiny.refusal(qwen3)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_only(qwen3: Path, name: str) -> None:
    (qwen3 / "model.safetensors").rename(qwen3 / name)
    assert re.search(rf"{name}.*safetensors", tiny.refusal(qwen3))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "adapter.*merge_and_unload"),
        ([".metadata", "__0_0.distcp"], "distributed checkpoint"),
        (["latest_checkpointed_iteration.txt", "iter_0000010/x"], "Megatron"),
        (["mp_rank_00/model_optim_rng.pt"], "Megatron"),
        (["global_step10/x", "latest", "zero_to_fp32.py"], "DeepSpeed"),
        (["model.gguf"], "GGUF"),
        (["readme.txt"], "no config.json"),
    ],
)
def test_other_layouts_are_named(tmp_path: Path, names: list[str], said: str) -> None:
    for name in names:
        (tmp_path / "it" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "it" / name).touch()
    assert re.search(said, tiny.refusal(tmp_path / "it"))


def test_an_adapter_beside_a_model_is_refused(qwen3: Path) -> None:
    (qwen3 / "adapter_config.json").write_text("{}")
    assert "adapter_config.json" in tiny.refusal(qwen3)


def test_no_weights_at_all(qwen3: Path) -> None:
    (qwen3 / "model.safetensors").unlink()
    assert "no safetensors weights" in tiny.refusal(qwen3)


# Tokenizer and chat template


def test_no_tokenizer(qwen3: Path) -> None:
    (qwen3 / "tokenizer.json").unlink()
    assert re.search("no tokenizer.json.*save_pretrained", tiny.refusal(qwen3))


@pytest.mark.parametrize("text", ["{}", "[1]", '{"version": "1.0", "model": {"type": "BPE"}}', "\x00"])
def test_tokenizer_that_is_none(qwen3: Path, text: str) -> None:
    (qwen3 / "tokenizer.json").write_text(text)
    assert str(qwen3 / "tokenizer.json") in tiny.refusal(qwen3)


def test_no_chat_template(qwen3: Path) -> None:
    (qwen3 / "chat_template.jinja").unlink()
    assert re.search("no chat template.*--chat-template", tiny.refusal(qwen3))
    assert "--chat-template" in tiny.refusal(qwen3, chat_template="no-such-file.jinja")
    assert open_checkpoint(qwen3, chat_template=tiny.TEMPLATE).chat_template == tiny.TEMPLATE


def test_vocabulary_larger_than_the_embedding(qwen3: Path) -> None:
    tiny.set_json(qwen3 / "config.json", vocab_size=99)
    tiny.edit_weights(
        qwen3,
        lambda arrays: arrays.update(
            {"model.embed_tokens.weight": np.ascontiguousarray(arrays["model.embed_tokens.weight"][:99])}
        ),
    )
    assert re.search("ids up to 100 but the embedding has only 99 rows", tiny.refusal(qwen3))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pad_token": "<pad>"}, "'<pad>' .pad_token"),
        ({"extra_special_tokens": ["<new>"]}, "'<new>'"),
        ({"added_tokens_decoder": {"101": {"content": "<more>", "special": True}}}, "'<more>'"),
        ({"auto_map": {"AutoTokenizer": ["tok.T", None]}}, "auto_map"),
        ({"chat_template": 3}, "chat_template"),
    ],
)
def test_tokenizer_config_that_would_surprise(qwen3: Path, values: dict[str, Any], said: str) -> None:
    if "chat_template" in values:
        (qwen3 / "chat_template.jinja").unlink()
    tiny.set_json(qwen3 / "tokenizer_config.json", **values)
    message = tiny.refusal(qwen3)
    assert re.search(said, message), message


def test_a_tokenizer_that_transformers_grows_is_refused(originals: dict[str, Path]) -> None:
    checkpoint = replace(open_checkpoint(originals["qwen3"]), num_tokenizer_ids=50)
    with pytest.raises(UserError, match="101 ids when loaded but 50"):
        load_tokenizer(checkpoint)
