"""Anchors: where draft blocks begin in a document, and what each of their slots should say.

Of a block, slot 0 is the clean anchor token and slot k predicts the token k places after it (arXiv
2602.06036, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.models.attention import AnchorLayout

IGNORED = -100
"""Label of a slot past the end of its document."""


@dataclass(frozen=True)
class AnchorBatch:
    """Anchors of a packed batch with their clean tokens and labels."""

    layout: AnchorLayout
    anchor_ids: Tensor
    """[anchors] int64: the clean token in slot 0."""
    labels: Tensor
    """[anchors, block - 1] int64; `IGNORED` past the end of the response."""
    teachers: Tensor
    """[anchors, block - 1] int64: the packed position from which the target itself predicts that label."""


def possible_anchors(loss_mask: Tensor) -> Tensor:
    """int64: positions where the target itself spoke and spoke on; loss_mask bool [tokens]."""
    return (loss_mask[:-1] & loss_mask[1:]).nonzero()[:, 0]


def draw_anchors(loss_mask: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Sorted anchor positions of one document, at most `most`, drawn without replacement.

    loss_mask: bool [tokens], true where the target itself spoke. An anchor lies there and has at least
    one such token right after it to predict.
    """
    candidates = possible_anchors(loss_mask)
    chosen = torch.randperm(candidates.shape[0], generator=generator)[:most]
    return candidates[chosen.sort().values]


def pack_anchors(
    documents: list[Tensor], loss_masks: list[Tensor], anchors: list[Tensor], block_size: int
) -> AnchorBatch:
    """Lay documents (token ids [tokens] each) end to end and read off every anchor's labels.

    Labels never cross the end of the response that the anchor lies in, let alone the document's: decoding
    has ended there. `anchors[i]` are positions inside `documents[i]`.
    """
    starts, positions, labels, clean, teachers = [], [], [], [], []
    offset = 0
    slots = torch.arange(1, block_size, device=anchors[0].device)
    for ids, mask, chosen in zip(documents, loss_masks, anchors, strict=True):
        reach = chosen[:, None] + slots
        inside = reach < ids.shape[0]
        reach = reach.clamp_max(ids.shape[0] - 1)
        inside = (inside & mask[reach]).cumprod(dim=1).bool()
        labels.append(torch.where(inside, ids[reach], IGNORED))
        teachers.append(reach - 1 + offset)
        clean.append(ids[chosen])
        positions.append(chosen)
        starts.append(torch.full_like(chosen, offset))
        offset += ids.shape[0]
    layout = AnchorLayout(torch.cat(starts), torch.cat(positions), block_size, offset)
    return AnchorBatch(layout, torch.cat(clean), torch.cat(labels), torch.cat(teachers))
