"""Acceptance on samples that training never sees: what picks the best checkpoint and says when to stop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.features.feature_shards import FeatureRow, FeatureSet
from dflash_core.models.drafter import Drafter
from dflash_core.training.anchors import possible_anchors
from dflash_core.training.blocks import accepted_drafts
from dflash_core.training.chain import walk
from dflash_core.training.documents import Documents

_SHARE = 20
"""One sample in so many is held out, ..."""
_FEWEST, _MOST_ANCHORS = 4, 1024
"""... at least so many, and beyond that while they have no more anchors than this together."""


@dataclass(frozen=True)
class HeldOutAcceptance:
    """What a drafter gets accepted on held-out answers of the target."""

    proxy_tau: float
    """1 + mean accepted drafts over all possible anchors (the per-block cumulative product)."""
    tau: float
    """Mean acceptance length of the rounds that greedy decoding would walk."""


def split(rows: FeatureSet, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on, and those held out; a function of the seed and the number of rows.

    Nothing is held out of fewer than 40 samples: every one is needed.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    held: list[int] = []
    anchors = 0
    for index in order[: len(rows) // _SHARE] if len(rows) >= 2 * _SHARE else ():
        anchors += len(possible_anchors(rows[index].loss_mask))
        if len(held) >= _FEWEST and anchors > _MOST_ANCHORS:
            break
        held.append(index)
    chosen = set(held)
    return [i for i in range(len(rows)) if i not in chosen], sorted(held)


def held_out_sums(
    drafter: Drafter, embedding: Tensor, head: Tensor, rows: Iterable[FeatureRow]
) -> tuple[float, float, float, float]:
    """Accepted drafts and blocks over all anchors, tokens and rounds of the chains; sums over the rows."""
    sums = torch.zeros(4, dtype=torch.float64)
    for row in rows:
        anchors = possible_anchors(row.loss_mask)
        if not anchors.numel():
            continue
        accepted, _ = accepted_drafts(drafter, embedding, head, Documents.of([row], [anchors]))
        chain = walk(row.loss_mask, accepted)
        sums += torch.tensor(
            [float(accepted.sum()), len(anchors), chain.tokens, len(chain.anchors)], dtype=torch.float64
        )
    accepted_sum, blocks, tokens, rounds = sums.tolist()
    return accepted_sum, blocks, tokens, rounds


def acceptance(sums: Iterable[float]) -> HeldOutAcceptance | None:
    """From `held_out_sums`, of one worker or added over several; None where there was no anchor."""
    accepted, blocks, tokens, rounds = sums
    if not blocks:
        return None
    return HeldOutAcceptance(proxy_tau=1 + accepted / blocks, tau=tokens / rounds)
