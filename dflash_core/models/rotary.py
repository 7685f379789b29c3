"""Rotary positions of the drafter: transformers' frequencies for every kind of scaling, in fp32 throughout.

Written here, and not taken from transformers' model files, because those double what a training process
pays for its imports (seen on two busy cores: 11.8 s of CPU with them, 6.2 s without).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dflash_core.models.drafter_config import DrafterConfig


class Rotary(nn.Module):
    """Cosines and sines at given positions (RoFormer, arXiv 2104.09864), as the Qwen3 family has them.

    Attributes carry the names that transformers' `dynamic_rope_update` looks for: it replaces the
    frequencies when a context outgrows the trained one.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = Qwen3Config(  # the part that transformers' scaling functions read
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rope_parameters=dict(config.rope_parameters),
        )
        self.rope_type = str(config.rope_parameters["rope_type"])
        self.max_seq_len_cached = self.original_max_seq_len = config.max_positions
        self.inv_freq: Tensor
        self.original_inv_freq: Tensor
        inv_freq, self.attention_scaling = self._frequencies(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def _frequencies(self, config: DrafterConfig) -> tuple[Tensor, float]:
        """[head_dim / 2] radians per position, and the factor on both cosine and sine."""
        if self.rope_type != "default":
            return ROPE_INIT_FUNCTIONS[self.rope_type](self.config)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / (float(config.rope_parameters["rope_theta"]) ** exponents), 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Frequencies follow the module to its device and keep their precision.

        Rounded to bf16 they would be off by up to 0.4 %, hence by whole turns at a few thousand tokens.
        """
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @dynamic_rope_update  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [batch, tokens, head_dim] in x's type at `position_ids` [batch, tokens]."""
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)
