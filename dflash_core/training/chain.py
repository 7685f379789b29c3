"""The chain of anchors that decoding would walk over a known answer, without decoding.

Under greedy decoding the emitted text is the target's own, whatever is drafted. So what a drafter would
get accepted at every position of an answer tells which positions become anchors, and τ itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.training.anchors import possible_anchors


@dataclass(frozen=True)
class Chain:
    """Decoding of one document's responses."""

    anchors: Tensor
    """int64 [rounds]: where each verify round's block began."""
    tokens: int
    """Tokens that the rounds emitted, cut at the end of each response; tokens / rounds is τ."""


def walk(loss_mask: Tensor, accepted: Tensor) -> Chain:
    """accepted: drafts accepted at each of `possible_anchors(loss_mask)`.

    A round emits its accepted drafts and the target's own next token, which is the next anchor. The first
    token of a response comes from prefill.
    """
    count_at = dict(zip(possible_anchors(loss_mask).tolist(), accepted.tolist(), strict=True))
    visited: list[int] = []
    tokens = 0
    for start, end in _runs(count_at):
        anchor = start
        while anchor < end:
            visited.append(anchor)
            emitted = min(count_at[anchor] + 1, end - anchor)
            tokens += emitted
            anchor += count_at[anchor] + 1
    return Chain(torch.tensor(visited, dtype=torch.int64), tokens)


def _runs(positions: Mapping[int, int]) -> list[tuple[int, int]]:
    """First position of every run of neighbors, and the one after its last: the response's last token."""
    starts = [p for p in positions if p - 1 not in positions]
    ends = [p + 1 for p in positions if p + 1 not in positions]
    return list(zip(starts, ends, strict=True))
