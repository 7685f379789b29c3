"""How much each slot of a draft block counts: by its place alone, or by how likely decoding gets there."""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
"""Decay constants that the paper gives, by block size."""

_DPACE_ALPHA = 0.5
"""alpha of D-PACE: what a slot's acceptance is smoothed towards 1 by (arXiv 2605.18810)."""


def default_gamma(block_size: int) -> float:
    """The paper's decay constant; between and beyond its three block sizes, on the line through them."""
    if block_size in _GAMMA:
        return _GAMMA[block_size]
    return max(1.0, 4.0 + (block_size - 8) * (7.0 - 4.0) / (16 - 8))


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """[block - 1] float32: exp(-(k - 1) / gamma) for slot k = 1, 2, ... (arXiv 2602.06036, section 4)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def dpace_weights(label_probabilities: Tensor, labeled: Tensor) -> Tensor:
    """[anchors, block - 1]: each slot's share in the expected accepted length (arXiv 2605.18810).

    With q_k the probability that the drafter gives slot k's label, s_k = (1 - alpha) q_k + alpha and
    P_i = prod_{j <= i} s_j, the weight of slot k is sum_{i >= k} P_i, held fixed in the gradient.
    Slots without a label count as s = 1 and weigh nothing.
    """
    smoothed = (1 - _DPACE_ALPHA) * label_probabilities.detach() + _DPACE_ALPHA
    reached = torch.where(labeled, smoothed, 1.0).cumprod(dim=1) * labeled
    return reached.flip(1).cumsum(dim=1).flip(1) * labeled
