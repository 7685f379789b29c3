"""Compact hidden states: 8 bits a number, with a scale for every token and tap.

float8_e4m3fn under a power of two (the layout that OCP's MX formats call E8M0). A float keeps small
channels beside the outliers of real models, where int8 under the same scale flattens them (measured in
`benchmarks/compact_features.py`); and a power of two makes decoding to bfloat16 exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BIAS = 127
_LARGEST_EXPONENT = 8
"""float8_e4m3fn ends at 448 = 1.75 x 2^8."""


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finite bfloat16 values [..., hidden] to float8 bit patterns [..., hidden] and scales [...], both uint8.

    Each vector is scaled so that its largest number lies in [256, 448], or in (224, 256): rounding is
    relative (1/16 at most) over the 14 binary orders below it, and absolute further down.
    """
    low, high = torch.aminmax(values, dim=-1)
    mantissa, exponent = torch.frexp(torch.maximum(high, -low).float())
    # The largest is mantissa x 2^exponent, mantissa in [0.5, 1): past 1.75 x 2^8 it needs one order more.
    scale = exponent - 1 - _LARGEST_EXPONENT + (mantissa > 0.875)
    scale = scale.clamp(-_BIAS, 254 - _BIAS)
    factor = torch.ldexp(torch.ones_like(mantissa), -scale).to(values.dtype)
    codes = (values * factor[..., None]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8), (scale + _BIAS).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., hidden] of what `encode` gave; exact, save below bfloat16's smallest numbers."""
    # 2^e as a bfloat16 is e + 127 in the exponent's bits; 0 would be a subnormal and stands for 0.
    factor = (scales.to(torch.int16) << 7).view(torch.bfloat16)
    # A table of all 256, since torch's own conversion is several times slower on a CPU.
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn)
    values = table.to(torch.bfloat16).index_select(0, codes.flatten().int()).view(codes.shape)
    return values.mul_(factor[..., None])
