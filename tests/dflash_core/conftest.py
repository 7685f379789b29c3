"""Tiny real checkpoints, built once a session; tests that change one work on a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dflash_core import tiny_checkpoints as tiny


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, not to be written to. `qwen3` and `sharded` are the same model."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "qwen3": tiny.build(root / "qwen3", "qwen3", tie_word_embeddings=True),
        "sharded": tiny.build(root / "sharded", "qwen3", tie_word_embeddings=True, shard_size="20KB"),
        "qwen2": tiny.build(root / "qwen2", "qwen2", dtype="bfloat16"),
        "llama": tiny.build(root / "llama", "llama", dtype="float16", rope_parameters=dict(tiny.ROPE_LLAMA3)),
        "biased": tiny.build(root / "biased", "llama", attention_bias=True, mlp_bias=True),
    }


@pytest.fixture
def qwen3(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return tiny.copy(originals["qwen3"], tmp_path / "qwen3")


@pytest.fixture
def sharded(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage, in several shards."""
    return tiny.copy(originals["sharded"], tmp_path / "sharded")
