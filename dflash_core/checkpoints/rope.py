"""Rotary position parameters in either spelling, given back as transformers 5 spells them.

transformers 4 wrote `rope_theta` and `rope_scaling` beside each other; transformers 5 writes one
`rope_parameters`. A config that carries both must say the same thing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError

DEFAULT_THETA = 10_000.0
"""What transformers takes for Llama and Qwen where the config is silent."""
_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_NEEDS_ORIGINAL_LENGTH = ("yarn", "llama3", "longrope")
CONFIG_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""The keys of a raw config that `rope_parameters` replaces."""


def rope_parameters(path: Path, raw: Mapping[str, Any], max_positions: int, head_dim: int) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the scaling's own numbers; `path` names the config in errors.

    Raises UserError on an unknown type, a missing or unusable number, one set per layer type, or
    two spellings that contradict each other.
    """
    spellings = {key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None}
    found = [
        _standard(path, key, given, raw, max_positions, head_dim)
        for key, given in (spellings or {"rope_theta": {}}).items()
    ]
    if found[-1] != found[0]:
        raise UserError(f"{path}: rope_parameters and rope_scaling contradict each other: keep one of them")
    return found[0]


def _standard(
    path: Path, key: str, given: Any, raw: Mapping[str, Any], max_positions: int, head_dim: int
) -> dict[str, Any]:
    """One spelling, `given` under `key`, completed from the config's top level and checked."""
    if not isinstance(given, Mapping):
        raise UserError(f"{path}: {key} is no object: correct it or export the checkpoint again")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UserError(f"{path}: {key} differs by layer type: only one set for all layers is supported")
    rope = {name: value for name, value in given.items() if name != "type" and value is not None}
    rope_type = given.get("rope_type", given.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _REQUIRED:
        raise UserError(
            f"{path}: rope type {rope_type!r} in {key} is not one of {', '.join(_REQUIRED)}: correct it"
        )
    rope["rope_type"] = rope_type
    rope["rope_theta"] = _theta(path, rope, raw)
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    if rope_type in _NEEDS_ORIGINAL_LENGTH:
        rope[_ORIGINAL_LENGTH] = raw.get(_ORIGINAL_LENGTH) or rope.get(_ORIGINAL_LENGTH) or max_positions
    for name in _REQUIRED[rope_type]:
        if name not in rope:
            raise UserError(f"{path}: {key} of type {rope_type} lacks {name}: add it")
    for name, value in rope.items():
        if not _fits(name, value, head_dim):
            raise UserError(
                f"{path}: {name} in {key} cannot be used: correct it or export the checkpoint again"
            )
    return rope


def _theta(path: Path, rope: Mapping[str, Any], raw: Mapping[str, Any]) -> float:
    inside, beside = rope.get("rope_theta"), raw.get("rope_theta")
    if inside is not None and beside is not None and inside != beside:
        raise UserError(
            f"{path}: rope_theta is {beside!r} but rope_parameters says {inside!r}: keep one of them"
        )
    theta = next((value for value in (inside, beside) if value is not None), DEFAULT_THETA)
    if not _is_number(theta) or not 0 < theta <= 1e15:
        raise UserError(f"{path}: rope_theta is {theta!r}, not a positive number: correct it")
    return float(theta)


def _fits(name: str, value: Any, head_dim: int) -> bool:
    """Whether `value` is usable as rope parameter `name`."""
    if name in ("short_factor", "long_factor"):
        right_size = isinstance(value, list) and len(value) == head_dim // 2
        return right_size and all(_is_number(item) and 0 < item < 1e9 for item in value)
    if name == _ORIGINAL_LENGTH:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 32
    if name == "partial_rotary_factor":
        # Heads with an unrotated part would need their own drafter code.
        return _is_number(value) and value == 1
    if name == "factor":
        return _is_number(value) and 1 <= value <= 1e6
    return name == "rope_type" or isinstance(value, bool) or (_is_number(value) and 0 <= value <= 1e15)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
