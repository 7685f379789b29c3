"""The DFlash draft model (arXiv 2602.06036) in the published weight layout.

A few Qwen3-shaped layers whose keys and values come from the *target's* features as well as from the
block itself: queries are the block [anchor, mask, mask, ...]; the context is the target's tapped
hidden states, fused by `fc` and `hidden_norm`. It owns no embeddings and no head: both are the
target's, frozen. Names of parameters are those of the published checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.errors import UserError
from dflash_core.models.attention import AnchorLayout, anchored_attention, block_attention
from dflash_core.models.drafter_config import DrafterConfig, read_drafter_config
from dflash_core.models.rotary import Rotary

if TYPE_CHECKING:
    from dflash_core.models.target_weights import TargetWeights

WEIGHTS = "model.safetensors"


class ContextCache:
    """Keys and values of the context that the drafter has already read, layer by layer.

    Grows by doubling; holds context only, since a block's own keys die with its round.
    """

    def __init__(self) -> None:
        self.length = 0
        self._layers: list[tuple[Tensor, Tensor]] = []

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v [kv heads, new tokens, dim] after `length`; returns all of them."""
        needed = self.length + k.shape[1]
        if layer == len(self._layers):
            capacity = max(2 * needed, 256)
            shape = (k.shape[0], capacity, k.shape[2])
            self._layers.append((k.new_empty(shape), v.new_empty(shape)))
        keys, values = self._layers[layer]
        if needed > keys.shape[1]:
            keys, values = (F.pad(t, (0, 0, 0, 2 * needed - t.shape[1])) for t in (keys, values))
            self._layers[layer] = (keys, values)
        keys[:, self.length : needed] = k
        values[:, self.length : needed] = v
        return keys[:, :needed], values[:, :needed]


class DraftAttention(nn.Module):
    """Attention whose queries are the block and whose keys are the context and the block."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.attention_bias
        self.head_dim = config.head_dim
        self.layer = layer
        self.causal = config.layer_is_causal(layer)
        self.window = config.layer_window(layer)
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def _keys(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.k_norm(self._heads(self.k_proj(x))).transpose(0, 1), rope)

    def _values(self, x: Tensor) -> Tensor:
        return self._heads(self.v_proj(x)).transpose(0, 1)

    def _queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(x))).transpose(0, 1), rope)

    def _output(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(0, 1).flatten(1))

    def train_blocks(
        self,
        block: Tensor,
        context: Tensor,
        layout: AnchorLayout,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """block [anchors x block, hidden], context [packed tokens, hidden] -> like block."""
        values = self._values(context)
        attended = anchored_attention(
            # Under autocast norms and RoPE come out in float32, values in bfloat16.
            self._queries(block, block_rope).to(values.dtype),
            self._keys(context, context_rope).to(values.dtype),
            values,
            self._keys(block, block_rope).to(values.dtype),
            self._values(block),
            layout,
            causal=self.causal,
            window=self.window,
        )
        return self._output(attended)

    def draft_block(
        self,
        block: Tensor,
        context: Tensor,
        cache: ContextCache,
        block_rope: tuple[Tensor, Tensor],
        context_rope: tuple[Tensor, Tensor],
    ) -> Tensor:
        """block [block, hidden], context [new tokens, hidden] -> like block."""
        keys, values = cache.extend(self.layer, self._keys(context, context_rope), self._values(context))
        attended = block_attention(
            self._queries(block, block_rope),
            torch.cat([keys, self._keys(block, block_rope)], dim=1),
            torch.cat([values, self._values(block)], dim=1),
            causal=self.causal,
            window=self.window,
        )
        return self._output(attended)


class DraftMLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm layer of the drafter."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, layer)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The layer's second half, residual included."""
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The block-diffusion drafter. Run it with `train_blocks` (many anchors) or `draft_block` (one)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Rotary(config)

    def _rope(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(like[None], positions[None])
        return cos[0], sin[0]

    def _draft_layers(self) -> list[DraftLayer]:
        return cast("list[DraftLayer]", list(self.layers))

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped hidden states [tokens, taps x hidden] -> context [tokens, hidden]."""
        return self.hidden_norm(self.fc(features))

    def train_blocks(
        self, block: Tensor, features: Tensor, positions: Tensor, layout: AnchorLayout
    ) -> Tensor:
        """Final hidden states of every block of a packed batch.

        block [anchors x block, hidden]: embeddings of [anchor, mask, ...] per anchor;
        features [packed tokens, taps x hidden]; positions [packed tokens], each inside its document.
        """
        slots = torch.arange(layout.block_size, device=block.device)
        block_positions = (layout.positions[:, None] + slots).flatten()
        context = self.fuse(features)
        block_rope, context_rope = self._rope(block_positions, block), self._rope(positions, block)
        for layer in self._draft_layers():
            normed = layer.input_layernorm(block)
            attended = layer.self_attn.train_blocks(normed, context, layout, block_rope, context_rope)
            block = layer.feed_forward(block + attended)
        return self.norm(block)

    def draft_block(self, block: Tensor, features: Tensor, cache: ContextCache) -> Tensor:
        """Final hidden states [block, hidden] of one block that starts right after the context.

        `features` [new tokens, taps x hidden] are those that `cache` has not seen; they are added.
        """
        start = cache.length
        anchor = start + features.shape[0]
        context_rope = self._rope(torch.arange(start, anchor, device=block.device), block)
        block_rope = self._rope(torch.arange(anchor, anchor + block.shape[0], device=block.device), block)
        context = self.fuse(features)
        for layer in self._draft_layers():
            normed = layer.input_layernorm(block)
            attended = layer.self_attn.draft_block(normed, context, cache, block_rope, context_rope)
            block = layer.feed_forward(block + attended)
        cache.length = anchor
        return self.norm(block)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding, half-split layout; x [heads, tokens, dim], rope two [tokens, dim]."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def new_drafter(config: DrafterConfig, *, start: TargetWeights | None, seed: int) -> Drafter:
    """A fresh drafter, random or, with `start` given, begun as the target's own layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config)
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
    if start is not None:
        _start_from_target(drafter, start)
    return drafter


@torch.no_grad()
def _start_from_target(drafter: Drafter, target: TargetWeights) -> None:
    """Copy evenly spread target layers into the draft layers; begin `fc` as the mean of the taps.

    A parameter that the target lacks (q_norm on Llama) or has in another shape keeps its fresh value.
    """
    last = drafter.config.num_target_layers - 1
    count = len(drafter.layers)
    for index, layer in enumerate(drafter.layers):
        source = target.layer(round((index + 1) * last / count))
        own = layer.state_dict()
        fits = {k: v.to(own[k]) for k, v in source.items() if k in own and v.shape == own[k].shape}
        layer.load_state_dict(fits, strict=False)
    taps = len(drafter.config.target_layer_ids)
    eye = torch.eye(drafter.config.hidden_size) / taps
    drafter.fc.weight.copy_(eye.repeat(1, taps))


def save_drafter(drafter: Drafter, directory: Path) -> None:
    """Write config.json and model.safetensors; each appears whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in drafter.state_dict().items()}
    config = drafter.config.to_json()
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    temporary = directory / f".{WEIGHTS}.tmp"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.replace(directory / WEIGHTS)
    temporary = directory / ".config.json.tmp"
    temporary.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    temporary.replace(directory / "config.json")


def load_drafter(directory: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Drafter:
    """Load a drafter directory in the published layout.

    Raises UserError on a missing or damaged file, a missing, unknown or misshapen weight, or a
    weight that is not finite.
    """
    config = read_drafter_config(directory)
    path = directory / WEIGHTS
    if not path.is_file():
        raise UserError(f"{directory} holds no {WEIGHTS}; pass a drafter saved as safetensors")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore the file") from None
    drafter = Drafter(config)
    expected = drafter.state_dict()
    _refuse_unfit(path, expected, weights)
    drafter.load_state_dict(weights)
    return drafter.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _refuse_unfit(path: Path, expected: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    remedy = "pass the weights that belong to this config.json"
    if missing := sorted(set(expected) - set(weights)):
        raise UserError(f"{path} lacks the weight {missing[0]!r} ({len(missing)} missing); {remedy}")
    if unknown := sorted(set(weights) - set(expected)):
        raise UserError(f"{path} holds an unknown weight {unknown[0]!r} ({len(unknown)} unknown); {remedy}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            want, got = list(expected[name].shape), list(tensor.shape)
            raise UserError(f"{path}: {name!r} has shape {got}, the config asks for {want}; {remedy}")
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {name!r} holds NaN or infinite values; retrain or restore the drafter")
