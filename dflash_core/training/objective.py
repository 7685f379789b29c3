"""The objective: a block's loss through the target's frozen head, and the acceptance that it stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.training.anchors import IGNORED
from dflash_core.training.losses import LOSSES, RowLoss
from dflash_core.training.slot_weights import decay_weights, default_gamma, dpace_weights

_HEAD_ROWS = 2048
"""Rows of [rows, vocab] logits alive at once."""


@dataclass(frozen=True)
class Objective:
    """Which loss a slot has, and how slots are weighed."""

    loss: str = "ce"
    """One of `losses.LOSSES`."""
    weights: str = "decay"
    """"decay" (the paper's) or "dpace"."""
    gamma: float | None = None
    """Of "decay"; None: the paper's for the block size."""

    def slot_weights(self, label_probabilities: Tensor, labeled: Tensor) -> Tensor:
        """[anchors, block - 1], zero where there is no label."""
        if self.weights == "dpace":
            return dpace_weights(label_probabilities, labeled)
        size = labeled.shape[1] + 1
        gamma = self.gamma or default_gamma(size)
        return decay_weights(size, gamma).to(labeled.device) * labeled


class _FrozenHead(torch.autograd.Function):
    """Losses of rows [rows] through a frozen head, with the logits alive for a few rows at a time.

    A row's loss depends on no other row and the head takes no gradient, so each row's gradient with
    respect to its hidden state is found in the forward pass, chunk by chunk, and the logits are dropped
    at once. Beside the losses: log q(label), and whether the label is the drafter's first choice.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor | None, loss: RowLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        log_q = torch.empty_like(losses)
        right = torch.empty(labels.shape, dtype=torch.bool, device=hidden.device)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for begin in range(0, labels.shape[0], _HEAD_ROWS):
            rows = slice(begin, begin + _HEAD_ROWS)
            logits = F.linear(hidden[rows], head).float()
            wanted = labels[rows, None]
            right[rows] = logits.argmax(dim=-1) == labels[rows]
            log_q[rows] = logits.gather(1, wanted)[:, 0] - logits.logsumexp(dim=-1)
            target = None if teacher is None else F.linear(teacher[rows], head).float()
            if gradient is None:
                losses[rows] = loss(logits, labels[rows], target)
                continue
            with torch.enable_grad():
                each = loss(logits.requires_grad_(), labels[rows], target)
                (slope,) = torch.autograd.grad(each.sum(), logits)
            losses[rows] = each.detach()
            gradient[rows] = slope.to(head.dtype) @ head
        if gradient is not None:
            ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(log_q, right)
        return losses, log_q, right

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None, None, None, None


@dataclass(frozen=True)
class BlockLoss:
    """The loss of a batch of blocks and what acceptance it stands for."""

    total: Tensor
    """Scalar: sum of weight x loss over the labeled slots; divide by `weight`."""
    weight: float
    """Sum of the weights of the labeled slots."""
    chain: float
    """Sum over blocks of sum_k prod_{j<=k} [slot j right]: drafts that greedy verification would
    accept if the block were met in decoding. 1 + chain / blocks is the proxy of τ."""
    blocks: int


def block_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, objective: Objective, teacher: Tensor | None = None
) -> BlockLoss:
    """The weighted loss of blocks.

    hidden [anchors, block, width] (slot 0 is not used), head [vocab, width], labels [anchors, block - 1];
    teacher [anchors, block - 1, width]: the target's own last hidden states, for losses that need them.
    """
    labeled = labels != IGNORED
    losses, log_q, right = _FrozenHead.apply(
        hidden[:, 1:][labeled],
        head,
        labels[labeled],
        None if teacher is None else teacher[labeled],
        LOSSES[objective.loss],
    )
    weights = objective.slot_weights(_spread(log_q.exp(), labeled), labeled)
    chain = float(_spread(right.float(), labeled).cumprod(dim=1).sum())
    weight = float(weights.sum())
    assert math.isfinite(weight) and weight > 0
    return BlockLoss((losses * weights[labeled]).sum(), weight, chain, labels.shape[0])


def _spread(values: Tensor, labeled: Tensor) -> Tensor:
    """Values of the labeled slots at their places, zero elsewhere."""
    spread = torch.zeros(labeled.shape, dtype=values.dtype, device=values.device)
    spread[labeled] = values
    return spread
