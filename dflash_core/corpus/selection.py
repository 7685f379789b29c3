"""Which samples are worth training on: how badly a drafter drafts each, and who is kept.

Training on what the drafter gets right already moves little. A sample's score is the share of draft
tokens that greedy verification would refuse, at anchors spread evenly over the responses, in one masked
forward over the sample: no decoding. The random score is the control that any other is compared with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_core.models.drafter import Drafter
from dflash_core.training.anchors import possible_anchors
from dflash_core.training.blocks import accepted_drafts
from dflash_core.training.documents import Documents


def draft_score(drafter: Drafter, embedding: Tensor, head: Tensor, documents: Documents) -> float:
    """Share of drafts refused at the documents' anchors, in [0, 1]; 0.0 where there is no anchor.

    embedding and head [vocab, hidden] are the target's. Counted per block as in decoding: of a block, what
    stands behind the first wrong draft is refused too, and drafts past the end of a response do not count.
    """
    if not any(anchors.numel() for anchors in documents.anchors):
        return 0.0
    accepted, drafted = accepted_drafts(drafter, embedding, head, documents)
    return 1.0 - float(accepted.sum() / drafted.sum())


def spread_anchors(loss_mask: Tensor, most: int) -> Tensor:
    """At most `most` of a document's possible anchors, sorted, evenly spread over them all."""
    candidates = possible_anchors(loss_mask)
    count = min(most, candidates.shape[0])
    return candidates[torch.linspace(0, candidates.shape[0] - 1, count).round().long()]


def random_score(sample_id: str, seed: int) -> float:
    """In [0, 1), a function of the sample's name and the seed alone."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


@dataclass(frozen=True, order=True)
class Rank:
    """A sample's place among all: by score, and among equals by the hash of its name."""

    score: float
    tie: float

    @classmethod
    def of(cls, sample_id: str, score: float) -> Rank:
        return cls(score, random_score(sample_id, seed=0))


def lowest_kept(ranks: Iterator[tuple[Rank, int]] | Sequence[tuple[Rank, int]], fraction: float) -> Rank:
    """The least rank that is kept, so that the samples from there on have `fraction` of all tokens.

    ranks: every sample's rank and number of tokens, at least one. Counted in tokens, since those are what
    extraction, storage and training cost; at least one sample is kept. Twenty bytes a sample are held.
    """
    table = np.fromiter(
        ((rank.score, rank.tie, tokens) for rank, tokens in ranks),
        dtype=[("score", "f8"), ("tie", "f8"), ("tokens", "i4")],
    )
    order = np.lexsort((table["tie"], table["score"]))[::-1]
    reached = np.cumsum(table["tokens"][order], dtype=np.int64)
    count = int(np.searchsorted(reached, fraction * reached[-1], side="right"))
    last = table[order[max(count, 1) - 1]]
    return Rank(float(last["score"]), float(last["tie"]))
