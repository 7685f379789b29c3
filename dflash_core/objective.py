"""What the drafter is trained on: anchors, labels, position weights, and the chunked loss.

The recipe is the paper's (arXiv 2602.06036, section 4): random anchors inside the response, redrawn
every epoch; slot 0 is the clean anchor token, slot k predicts the token k places after it; context is
visible strictly before the anchor; cross-entropy on the target's own tokens, decaying with k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.attention import AnchorLayout

IGNORED = -100
"""Label of a slot past the end of its document."""

_GAMMA = {8: 4.0, 10: 5.0, 16: 7.0}
"""Decay constants that the paper gives, by block size."""

_HEAD_ROWS = 2048
"""Rows of [rows, vocab] logits alive at once."""


@dataclass(frozen=True)
class AnchorBatch:
    """Anchors of a packed batch with their clean tokens and labels."""

    layout: AnchorLayout
    anchor_ids: Tensor
    """[anchors] int64: the clean token in slot 0."""
    labels: Tensor
    """[anchors, block - 1] int64; `IGNORED` past the end of the response."""


def default_gamma(block_size: int) -> float:
    """The paper's decay constant; between and beyond its three block sizes, on the line through them."""
    if block_size in _GAMMA:
        return _GAMMA[block_size]
    return max(1.0, 4.0 + (block_size - 8) * (7.0 - 4.0) / (16 - 8))


def position_weights(block_size: int, gamma: float) -> Tensor:
    """[block - 1] float32: exp(-(k - 1) / gamma) for slot k = 1, 2, ... (paper, section 4)."""
    return torch.exp(-torch.arange(block_size - 1, dtype=torch.float32) / gamma)


def draw_anchors(loss_mask: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Sorted anchor positions of one document, at most `most`, drawn without replacement.

    loss_mask: bool [tokens], true where the target itself spoke. An anchor lies there and has at least
    one such token right after it to predict.
    """
    candidates = (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]
    chosen = torch.randperm(candidates.shape[0], generator=generator)[:most]
    return candidates[chosen.sort().values]


def pack_anchors(
    documents: list[Tensor], loss_masks: list[Tensor], anchors: list[Tensor], block_size: int
) -> AnchorBatch:
    """Lay documents (token ids [tokens] each) end to end and read off every anchor's labels.

    Labels never cross the end of the response that the anchor lies in, let alone the document's: decoding
    has ended there. `anchors[i]` are positions inside `documents[i]`.
    """
    starts, positions, labels, clean = [], [], [], []
    offset = 0
    slots = torch.arange(1, block_size, device=anchors[0].device)
    for ids, mask, chosen in zip(documents, loss_masks, anchors, strict=True):
        reach = chosen[:, None] + slots
        inside = reach < ids.shape[0]
        reach = reach.clamp_max(ids.shape[0] - 1)
        inside = (inside & mask[reach]).cumprod(dim=1).bool()
        labels.append(torch.where(inside, ids[reach], IGNORED))
        clean.append(ids[chosen])
        positions.append(chosen)
        starts.append(torch.full_like(chosen, offset))
        offset += ids.shape[0]
    layout = AnchorLayout(torch.cat(starts), torch.cat(positions), block_size, offset)
    return AnchorBatch(layout, torch.cat(clean), torch.cat(labels))


class _FrozenHeadLoss(torch.autograd.Function):
    """Sum of weight x CE through a frozen head, with the logits alive for a few rows at a time.

    The loss is linear in each row's CE and the head takes no gradient, so the gradient of the hidden
    states is computed in the forward pass, chunk by chunk, and the logits are dropped at once.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        correct = torch.empty(labels.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for begin in range(0, labels.shape[0], _HEAD_ROWS):
            rows = slice(begin, begin + _HEAD_ROWS)
            logits = F.linear(hidden[rows], head).float()
            correct[rows] = logits.argmax(dim=-1) == labels[rows]
            log_probabilities = logits.log_softmax(dim=-1)
            losses[rows] = -log_probabilities.gather(1, labels[rows, None])[:, 0]
            if gradient is not None:
                slope = log_probabilities.exp_()
                slope[torch.arange(slope.shape[0], device=slope.device), labels[rows]] -= 1
                slope *= weights[rows, None]
                gradient[rows] = slope.to(head.dtype) @ head
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, correct)
        return (losses * weights).sum(), losses, correct

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


@dataclass(frozen=True)
class BlockLoss:
    """The loss of a batch of blocks and what acceptance it stands for."""

    total: Tensor
    """Scalar: sum of weight x CE; divide by `weight`."""
    weight: float
    """Sum of the weights of the labeled slots."""
    chain: float
    """Sum over blocks of sum_k prod_{j<=k} [slot j right]: drafts that greedy verification would
    accept if the block were met in decoding. 1 + chain / blocks is the proxy of τ."""
    blocks: int


def block_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> BlockLoss:
    """Weighted CE of blocks.

    hidden [anchors, block, width] (slot 0 is not used), head [vocab, width], labels
    [anchors, block - 1], weights [block - 1].
    """
    labeled = labels != IGNORED
    spread = weights.to(hidden.device).expand(labels.shape)
    total, _, right = _FrozenHeadLoss.apply(hidden[:, 1:][labeled], head, labels[labeled], spread[labeled])
    hit = torch.zeros(labels.shape, dtype=torch.float32, device=hidden.device)
    hit[labeled] = right.float()
    chain = float(hit.cumprod(dim=1).sum())
    weight = float(spread[labeled].sum())
    assert math.isfinite(weight) and weight > 0
    return BlockLoss(total, weight, chain, labels.shape[0])
