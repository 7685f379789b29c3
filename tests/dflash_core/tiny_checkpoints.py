"""Small real checkpoints, written by transformers, and the ways to damage a copy of one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.errors import ExitCode, UserError

VOCAB = 120
"""Rows of the embedding; the tokenizer has fewer ids."""
SPECIAL = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|tool|>",
    "<|reserved_3|>",
    "<|reserved_7|>",
    "<|zoom|>",
]
IM_END, ENDOFTEXT, IM_START, TOOL, RESERVED_3, RESERVED_7, ZOOM = range(94, 101)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def build(
    folder: Path, family: str, *, shard_size: str = "1GB", dtype: str = "float32", **config: Any
) -> Path:
    """Save a random model of `family` ("qwen3", "qwen2" or "llama") with a tokenizer and a chat template."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(1)
    prefix = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[family]
    if family == "qwen3":
        config.setdefault("head_dim", 16)
    settings = getattr(transformers, f"{prefix}Config")(
        **{"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": IM_END, **_SHAPE, **config}
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(settings).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=shard_size)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    """Printable ASCII, one id a character, and `SPECIAL`."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code - 33 for code in range(33, 127)}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[2:],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def copy(original: Path, to: Path) -> Path:
    shutil.copytree(original, to)
    return to


@contextmanager
def editing(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON object in `path`, written back on leaving."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite `model.safetensors` after `change` has altered its arrays."""
    arrays = load_file(folder / "model.safetensors")
    change(arrays)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a safetensors file's header, leaving its bytes as they are."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def set_json(path: Path, **values: Any) -> None:
    with editing(path) as content:
        content.update(values)


def hub_cache(original: Path, hub: Path) -> Path:
    """Lay `original` out as the Hub's own cache does: blobs, and a snapshot of links to them."""
    repo, commit = hub / "models--org--name", "0123456789abcdef0123456789abcdef01234567"
    snapshot = repo / "snapshots" / commit
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(original.iterdir())):
        shutil.copy(file, repo / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (repo / "refs" / "main").write_text(commit)
    return snapshot


def print_of(path: Path, **options: Any) -> str:
    return open_checkpoint(path, **options).fingerprint


def refusal(path: Path | str, **options: Any) -> str:
    """The message with which opening `path` is refused: one line, exit code 2."""
    with pytest.raises(UserError) as caught:
        open_checkpoint(path, **options)
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    assert "\n" not in str(caught.value)
    return str(caught.value)
