"""The drafter's `config.json`: the published (z-lab) layout, read, checked and written.

`target_layer_ids` i means the output of decoder layer i of the target. The last decoder layer is
refused: what transformers hands out there is already normalized, so engines disagree about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from dflash_core.types import TargetConfig

ARCHITECTURE = "DFlashDraftModel"
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class DrafterConfig:
    """Shape and meaning of a DFlash drafter."""

    block_size: int
    """Tokens per block: the anchor and block_size - 1 drafts."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    """None: full layers are bidirectional inside the block, sliding ones causal (as published)."""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        problem = next((message for wrong, message in self._problems() if wrong), None)
        if problem:
            raise UserError(problem)

    def _problems(self) -> Iterator[tuple[bool, str]]:
        """Each thing that can be wrong, whether it is, and the sentence that says so."""
        ids, last = self.target_layer_ids, self.num_target_layers - 2
        unknown = sorted(set(self.layer_types) - set(LAYER_TYPES))
        yield (
            not 2 <= self.block_size <= 256,
            f"block size {self.block_size} is outside 2..256; pass --drafter.block-size within it",
        )
        yield not ids, "the drafter taps no target layer; pass --drafter.target-layer-ids"
        yield (
            list(ids) != sorted(set(ids)),
            f"target layer ids {list(ids)} are not distinct and ascending; mend --drafter.target-layer-ids",
        )
        yield (
            bool(ids) and not 0 <= ids[0] <= ids[-1] <= last,
            (
                f"target layer ids {list(ids)} are out of range: of {self.num_target_layers} layers, "
                f"0..{last} can be tapped (the last one's output is normalized); "
                "mend --drafter.target-layer-ids"
            ),
        )
        yield (
            not 0 <= self.mask_token_id < self.vocab_size,
            (
                f"mask token id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}; "
                "pass --mask-token-id within it"
            ),
        )
        yield (
            self.num_heads % self.num_kv_heads != 0,
            f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly; mend it",
        )
        yield (
            len(self.layer_types) != self.num_layers,
            (
                f"{len(self.layer_types)} layer types are given for {self.num_layers} draft layers; "
                "mend --drafter.layer-types"
            ),
        )
        yield bool(unknown), f"unknown layer types {unknown}; use {' or '.join(LAYER_TYPES)}"
        yield (
            "sliding_attention" in self.layer_types and not self.sliding_window,
            "sliding_attention layers need a window; pass --drafter.sliding-window",
        )

    def layer_is_causal(self, layer: int) -> bool:
        """Whether slot k of a block is blind to later slots in this layer."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer] == "sliding_attention"

    def layer_window(self, layer: int) -> int | None:
        """Width of this layer's sliding window in tokens; None for a full layer."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def to_json(self) -> dict[str, Any]:
        """The published layout, which z-lab's package reads unchanged."""
        rope = dict(self.rope_parameters)
        scaled = rope.get("rope_type", "default") != "default"
        data = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": rope,
            # Readers older than transformers 5 look for these two.
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_window_layers": self.num_layers,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "float32",
        }
        if self.is_causal is not None:
            data["is_causal"] = self.is_causal
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, where: str) -> DrafterConfig:
        """Read a published config. Raises UserError naming `where` and the key that is wrong."""
        inner = data.get("dflash_config") or {}
        merged = {**data, **inner}
        try:
            num_layers = int(merged["num_hidden_layers"])
            num_target_layers = int(merged["num_target_layers"])
            ids = merged.get("target_layer_ids")
            causal = merged.get("causal", merged.get("is_causal"))
            return cls(
                block_size=int(merged.get("block_size", 16)),
                mask_token_id=int(merged["mask_token_id"]),
                target_layer_ids=tuple(
                    int(i) for i in (ids or uniform_layer_ids(num_target_layers, num_layers))
                ),
                num_target_layers=num_target_layers,
                hidden_size=int(merged["hidden_size"]),
                num_layers=num_layers,
                num_heads=int(merged["num_attention_heads"]),
                num_kv_heads=int(merged["num_key_value_heads"]),
                head_dim=int(
                    merged.get("head_dim") or merged["hidden_size"] // merged["num_attention_heads"]
                ),
                intermediate_size=int(merged["intermediate_size"]),
                vocab_size=int(merged["vocab_size"]),
                max_positions=int(merged["max_position_embeddings"]),
                rms_norm_eps=float(merged.get("rms_norm_eps", 1e-6)),
                rope_parameters=_rope_parameters(merged),
                layer_types=tuple(merged.get("layer_types") or ("full_attention",) * num_layers),
                sliding_window=merged.get("sliding_window"),
                is_causal=None if causal is None else bool(causal),
                attention_bias=bool(merged.get("attention_bias", False)),
            )
        except KeyError as error:
            raise UserError(
                f"{where}: the drafter's config has no {error.args[0]!r}; "
                "pass a directory in the published DFlash layout"
            ) from None
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: {error}; pass a drafter in the published DFlash layout") from None


def _where_else(directory: Path) -> str:
    if (directory / "drafter" / "config.json").is_file():
        return f"pass {directory / 'drafter'}"
    if str(directory).startswith("models:"):
        return "download it with mlflow.artifacts.download_artifacts and pass the directory"
    return "pass a drafter directory"


def read_drafter_config(directory: Path) -> DrafterConfig:
    """Read `directory/config.json`. Raises UserError if it is not a DFlash drafter's."""
    path = directory / "config.json"
    if not path.is_file():
        raise UserError(f"{directory} holds no config.json; {_where_else(directory)}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); restore the drafter's config") from None
    if not isinstance(data, dict) or ARCHITECTURE not in (data.get("architectures") or []):
        raise UserError(f"{path} does not name the {ARCHITECTURE} architecture; pass a DFlash drafter")
    return DrafterConfig.from_json(data, where=str(path))


def check_fits(drafter: DrafterConfig, target: TargetConfig, *, where: str) -> None:
    """Raise UserError unless this drafter can read this target's features and share its head."""
    pairs = (
        ("hidden size", drafter.hidden_size, target.hidden_size),
        ("number of target layers", drafter.num_target_layers, target.num_layers),
        ("vocabulary", drafter.vocab_size, target.vocab_size),
    )
    for what, has, wants in pairs:
        if has != wants:
            raise UserError(
                f"{where}: the drafter's {what} is {has}, the target's is {wants}; "
                "pass a drafter that was trained for this target"
            )


def uniform_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers spread uniformly from the 2nd to the 3rd-last (DFlash, arXiv 2602.06036, section 4).

    Fewer than `num_taps` ids come back where the target is too shallow to hold distinct ones.
    """
    if num_target_layers < 2:
        raise UserError(f"a target of {num_target_layers} layers is too shallow to be tapped")
    if num_taps == 1 or num_target_layers < 5:
        first, last = (num_target_layers // 2,) * 2 if num_taps == 1 else (0, num_target_layers - 2)
    else:
        first, last = 1, num_target_layers - 3
    last = min(last, num_target_layers - 2)
    first = min(first, last)
    steps = max(num_taps - 1, 1)
    return tuple(sorted({round(first + i * (last - first) / steps) for i in range(num_taps)}))


def config_for_target(
    target: TargetConfig,
    *,
    mask_token_id: int,
    block_size: int,
    num_layers: int,
    target_layer_ids: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    layer_types: tuple[str, ...] | None = None,
) -> DrafterConfig:
    """A drafter shaped after its target: same width, heads, positions and RoPE."""
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    return DrafterConfig(
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids or uniform_layer_ids(target.num_layers, 5),
        num_target_layers=target.num_layers,
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        vocab_size=target.vocab_size,
        max_positions=target.max_positions,
        rms_norm_eps=target.rms_norm_eps,
        rope_parameters=dict(target.rope_parameters),
        layer_types=layer_types or (kind,) * num_layers,
        sliding_window=sliding_window,
    )


def _rope_parameters(data: Mapping[str, Any]) -> dict[str, Any]:
    given = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise TypeError("rope_parameters must be an object")
    rope = {"rope_type": given.get("rope_type", given.get("type", "default")), **given}
    rope.pop("type", None)
    rope["rope_theta"] = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
    return rope
