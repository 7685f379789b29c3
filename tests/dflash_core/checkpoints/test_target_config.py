"""What of config.json is refused, and how rotary parameters are read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dflash_core.checkpoints.checkpoint import open_checkpoint
from tests.dflash_core import tiny_checkpoints as tiny


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks tensor model.layers.2"),
        ({"num_hidden_layers": 1, "layer_types": None}, "holds tensor model.layers.1"),
        ({"num_attention_heads": 3}, "num_key_value_heads 2 does not divide num_attention_heads 3"),
        ({"num_attention_heads": 8}, r"o_proj.weight has shape \[32, 64\].*\[32, 128\]"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"vocab_size": 100}, r"embed_tokens.weight has shape \[120, 32\]"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
        ({"max_position_embeddings": 2.5}, "max_position_embeddings is 2.5"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"tie_word_embeddings": False}, "lacks tensor lm_head.weight"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["full_attention", "mamba"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is not set"),
        ({"sliding_window": -4}, "sliding_window is -4"),
        ({"num_labels": 10**12}, "num_labels"),
        ({"initializer_range": "0.02"}, "initializer_range is '0.02'"),
        ({"use_cache": 1}, "use_cache is 1"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": []}, "architectures is"),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "architectures is"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "auto_map.*code"),
        ({"attn_implementation": "someone/kernel"}, "someone/kernel"),
        ({"_attn_implementation_internal": {"": "someone/kernel"}}, "someone/kernel"),
        ({"transformers_weights": "other.safetensors"}, "other.safetensors"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized.*quantization_config"),
        ({"eos_token_id": 120}, "eos_token_id is 120"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is '2'"),
    ],
)
def test_config_out_of_bounds(qwen3: Path, values: dict[str, Any], said: str) -> None:
    tiny.set_json(qwen3 / "config.json", **values)
    message = tiny.refusal(qwen3)
    assert re.search(said, message), message
    assert str(qwen3) in message


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope type"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "factor in rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": True}}, "factor in rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_parameters": "default"}, "rope_parameters is no object"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor",
        ),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0 but rope_parameters says 10000.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradict"),
    ],
)
def test_rope_out_of_bounds(qwen3: Path, values: dict[str, Any], said: str) -> None:
    tiny.set_json(qwen3 / "config.json", **values)
    message = tiny.refusal(qwen3)
    assert re.search(said, message), message


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "truncate": False},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0},
        tiny.ROPE_LLAMA3,
        {},
    ],
)
@pytest.mark.parametrize("spelling", [4, 5])
def test_rope_is_read_as_transformers_reads_it(qwen3: Path, rope: dict[str, Any], spelling: int) -> None:
    from transformers import AutoConfig

    with tiny.editing(qwen3 / "config.json") as config:
        del config["rope_parameters"]
        if spelling == 5:
            config["rope_parameters"] = {"rope_theta": 5e5, **rope}
        else:
            config |= {"rope_theta": 5e5, "rope_scaling": rope or None}
    assert open_checkpoint(qwen3).config.rope_parameters == AutoConfig.from_pretrained(qwen3).rope_parameters


def test_sliding_windows_are_allowed(qwen3: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    tiny.set_json(qwen3 / "config.json", layer_types=kinds, sliding_window=64, use_sliding_window=True)
    assert open_checkpoint(qwen3).config.raw["layer_types"] == kinds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"x"',
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_config_that_is_not_plain_json(qwen3: Path, text: str) -> None:
    (qwen3 / "config.json").write_text(text)
    assert str(qwen3 / "config.json") in tiny.refusal(qwen3)


def test_config_too_big_to_be_one(qwen3: Path) -> None:
    (qwen3 / "config.json").write_text("{" + " " * (5 << 20) + "}")
    assert re.search(r"config.json has 5,242,882 bytes", tiny.refusal(qwen3))
