"""Draft blocks of packed documents, many anchors at once: their loss, and which drafts would be accepted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.models.drafter import Drafter
from dflash_core.training.anchors import IGNORED, AnchorBatch, pack_anchors
from dflash_core.training.documents import Documents
from dflash_core.training.objective import BlockLoss, Objective, block_loss

_HEAD_ROWS = 2048
"""Rows of [rows, vocab] logits alive at once."""


def draft_blocks(drafter: Drafter, embedding: Tensor, documents: Documents) -> tuple[Tensor, AnchorBatch]:
    """The drafter's hidden states [anchors, block, hidden] of packed documents, and what they should say.

    embedding [vocab, hidden] is the target's.
    """
    device, size = embedding.device, drafter.config.block_size
    ids, masks, anchors = (
        [t.to(device) for t in part] for part in (documents.ids, documents.loss_masks, documents.anchors)
    )
    batch = pack_anchors(ids, masks, anchors, size)
    positions = torch.cat([torch.arange(len(d), device=device) for d in ids])
    slots = torch.full((batch.layout.num_anchors, size), drafter.config.mask_token_id, device=device)
    slots[:, 0] = batch.anchor_ids
    dtype = drafter.norm.weight.dtype
    block = F.embedding(slots.flatten(), embedding).to(dtype)
    features = documents.features.to(device=device, dtype=dtype)
    hidden = drafter.train_blocks(block, features, positions, batch.layout)
    return hidden.view(-1, size, hidden.shape[-1]), batch


def drafter_loss(
    drafter: Drafter, embedding: Tensor, head: Tensor, objective: Objective, documents: Documents
) -> BlockLoss:
    """The loss of packed documents at their anchors; embedding and head [vocab, hidden] are the target's."""
    hidden, batch = draft_blocks(drafter, embedding, documents)
    teacher = None
    if documents.last_hidden is not None:
        teacher = documents.last_hidden.to(head.device)[batch.teachers].to(head.dtype)
    return block_loss(hidden.to(head.dtype), head, batch.labels, objective, teacher)


@torch.no_grad()
def accepted_drafts(
    drafter: Drafter, embedding: Tensor, head: Tensor, documents: Documents
) -> tuple[Tensor, Tensor]:
    """Of every anchor's block, how many drafts greedy verification would accept, and how many there are.

    Two int64 [anchors], over all documents in their order. What stands behind the first wrong draft is
    not accepted; slots past the end of a response are no drafts.
    """
    hidden, batch = draft_blocks(drafter, embedding, documents)
    labels = batch.labels
    drafted = hidden[:, 1:].flatten(0, 1).to(head.dtype)
    chosen = torch.cat([F.linear(rows, head).argmax(dim=-1) for rows in drafted.split(_HEAD_ROWS)])
    accepted = (chosen.view(labels.shape) == labels).cumprod(dim=1).sum(dim=1)
    return accepted, (labels != IGNORED).sum(dim=1)
