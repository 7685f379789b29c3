"""A target's `config.json`, parsed and bounded by us before any library acts on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.checkpoints.architectures import ARCHITECTURES, DecoderShape
from dflash_core.checkpoints.rope import rope_parameters
from dflash_core.checkpoints.strict_json import MEBIBYTE, read_object
from dflash_core.errors import UserError
from dflash_core.types import TargetConfig

MAX_BYTES = 4 * MEBIBYTE
DTYPES = ("float32", "bfloat16", "float16", "float64")
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_target_config(path: Path) -> TargetConfig:
    """Parse and check `config.json`; `torch_dtype` is empty where it names none.

    Raises UserError on anything out of bounds, unsupported, quantized or asking for remote code.
    """
    raw = read_object(path, MAX_BYTES)
    fields = _Fields(path, raw)
    _refuse_redirections(path, raw)
    name = _architecture(fields)
    architecture = ARCHITECTURES[name]
    hidden = fields.integer("hidden_size", 1, 1 << 17)
    heads = fields.integer("num_attention_heads", 1, 4096)
    kv_heads = fields.integer(
        "num_key_value_heads", 1, 4096, default=None if architecture.kv_heads_required else heads
    )
    if heads % kv_heads:
        raise fields.error(f"num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}")
    head_dim = _head_dim(fields, hidden, heads, required=architecture.head_dim_required)
    max_positions = fields.integer("max_position_embeddings", 1, 1 << 32)
    layers = fields.integer("num_hidden_layers", 1, 4096)
    fields.one_of("hidden_act", ("silu", "swish"), default="silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        fields.boolean(key)
    _check_unused(fields)
    _check_windows(fields, layers)
    return TargetConfig(
        model_type=architecture.model_type,
        architecture=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, 1 << 22),
        vocab_size=fields.integer("vocab_size", 2, 1 << 24),
        max_positions=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-20, 1.0),
        rope_parameters=rope_parameters(path, raw, max_positions, head_dim),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        torch_dtype=_dtype(fields),
        raw=raw,
    )


def decoder_shape(config: TargetConfig) -> DecoderShape:
    """The sizes that decide every tensor's shape."""
    return DecoderShape(
        hidden=config.hidden_size,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        attention_bias=bool(config.raw.get("attention_bias")),
        mlp_bias=bool(config.raw.get("mlp_bias")),
    )


def _refuse_redirections(path: Path, raw: Mapping[str, Any]) -> None:
    """Keys that make a library load code or weights that we have not looked at."""
    if raw.get("auto_map") is not None:
        raise UserError(
            f"{path} has auto_map, which runs code shipped with the checkpoint: "
            "export the model to an architecture that transformers knows and drop auto_map"
        )
    for key, value in raw.items():
        # transformers fetches a kernel from the Hub, and runs it, when this is a repository's name.
        if "_implementation" in key and "/" in str(value):
            raise UserError(f"{path} asks for the kernel {value!r} in {key}: remove that key")
    if raw.get("transformers_weights") is not None:
        raise UserError(
            f"{path} redirects the weights to {raw['transformers_weights']!r} in transformers_weights: "
            "remove that key and name the file model.safetensors"
        )
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            raise UserError(
                f"{path} describes a quantized checkpoint ({key}): "
                "pass the unquantized checkpoint that it was made from"
            )


def _architecture(fields: _Fields) -> str:
    names = fields.raw.get("architectures")
    supported = ", ".join(sorted(ARCHITECTURES))
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error(f"architectures is {names!r}", f"name exactly one of {supported}")
    if names[0] not in ARCHITECTURES:
        raise fields.error(
            f"architecture {names[0]!r} is not supported", f"pass a checkpoint of one of {supported}"
        )
    model_type = ARCHITECTURES[names[0]].model_type
    if fields.raw.get("model_type") != model_type:
        raise fields.error(
            f"model_type is {fields.raw.get('model_type')!r} for {names[0]}", f"set it to {model_type!r}"
        )
    return names[0]


def _head_dim(fields: _Fields, hidden: int, heads: int, *, required: bool) -> int:
    if fields.raw.get("head_dim") is None and not required and hidden % heads:
        raise fields.error(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}", "give head_dim"
        )
    head_dim = fields.integer("head_dim", 2, 4096, default=None if required else hidden // heads)
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd, which rotary positions cannot use")
    return head_dim


def _check_unused(fields: _Fields) -> None:
    """Values that mean nothing to us, but that transformers trips over when it loads the model."""
    fields.boolean("use_cache")
    for key in ("initializer_range", "attention_dropout"):
        if fields.raw.get(key) is not None:
            fields.number(key, 0.0, 1.0)
    # transformers builds a table of this many names.
    fields.integer("num_labels", 0, 100_000, default=0)


def _check_windows(fields: _Fields, layers: int) -> None:
    for key in ("sliding_window", "max_window_layers"):
        fields.integer(key, 0, 1 << 32, default=0)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or not all(kind in _LAYER_TYPES for kind in kinds):
        raise fields.error("layer_types holds something other than " + " and ".join(_LAYER_TYPES))
    if len(kinds) != layers:
        raise fields.error(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    if "sliding_attention" in kinds and not fields.raw.get("sliding_window"):
        raise fields.error("layer_types has sliding_attention but sliding_window is not set")


def _dtype(fields: _Fields) -> str:
    value = fields.raw.get("dtype", fields.raw.get("torch_dtype"))
    if value is None or value == "auto":
        return ""
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in DTYPES:
        raise fields.error(f"dtype {value!r} is not supported", f"use one of {', '.join(DTYPES)}")
    return str(name)


class _Fields:
    """Typed, bounded access to a config's keys with errors that name file, key and value."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def error(self, problem: str, remedy: str = "correct it or export the checkpoint again") -> UserError:
        return UserError(f"{self.path}: {problem}: {remedy}")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{key} is {_shown(value)}, not a whole number from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.raw.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(f"{key} is {_shown(value)}, not a number from {low} to {high}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{key} is {_shown(value)}, neither true nor false")
        return bool(value)

    def one_of(self, key: str, allowed: tuple[str, ...], *, default: str) -> str:
        value = self.raw.get(key, default)
        if value not in allowed:
            raise self.error(f"{key} is {_shown(value)}, not {' or '.join(allowed)}")
        return str(value)


def _shown(value: Any) -> str:
    """A value short enough for one line of error."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
