"""Losses of one draft slot: what the drafter says against what the target says there.

`ce` knows the target's token only; the others know its distribution p over the vocabulary, q being the
drafter's. Under rejection sampling a draft is accepted with probability a = sum_v min(p_v, q_v) (Leviathan
et al., arXiv 2211.17192, section 3.3), which `tv`, `nla` and `lk` raise directly (arXiv 2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

RowLoss = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(drafter logits [rows, vocab] float32, labels [rows], target logits [rows, vocab] float32) -> [rows]."""

_LK_SHARPNESS = 3.0
"""eta of the hybrid: how fast KL gives way to TV as the overlap grows (arXiv 2602.23881)."""


def cross_entropy(logits: Tensor, labels: Tensor, _target: Tensor | None) -> Tensor:
    """-log q(label)."""
    return F.cross_entropy(logits, labels, reduction="none")


def kl_divergence(logits: Tensor, _labels: Tensor, target: Tensor | None) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v)."""
    assert target is not None
    log_p = target.log_softmax(dim=-1)
    return (log_p.exp() * (log_p - logits.log_softmax(dim=-1))).sum(dim=-1)


def total_variation(logits: Tensor, _labels: Tensor, target: Tensor | None) -> Tensor:
    """1 - a. Its gradient is weak where the overlap is low."""
    return 1 - overlap(logits, target)


def negative_log_acceptance(logits: Tensor, _labels: Tensor, target: Tensor | None) -> Tensor:
    """-log a."""
    return -overlap(logits, target).clamp_min(torch.finfo(torch.float32).tiny).log()


def lk_hybrid(logits: Tensor, labels: Tensor, target: Tensor | None) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) (1 - a), lambda = exp(-eta a) held fixed in the gradient."""
    accepted = overlap(logits, target)
    share = (-_LK_SHARPNESS * accepted.detach()).exp()
    return share * kl_divergence(logits, labels, target) + (1 - share) * (1 - accepted)


def overlap(logits: Tensor, target: Tensor | None) -> Tensor:
    """a = sum_v min(p_v, q_v), [rows]."""
    assert target is not None
    return torch.minimum(target.softmax(dim=-1), logits.softmax(dim=-1)).sum(dim=-1)


LOSSES: dict[str, RowLoss] = {
    "ce": cross_entropy,
    "kl": kl_divergence,
    "tv": total_variation,
    "nla": negative_log_acceptance,
    "lk": lk_hybrid,
}
"""By their names in the configuration."""


def needs_target(loss: str) -> bool:
    """Whether a loss needs the target's distribution, hence its last hidden states."""
    return loss != "ce"
