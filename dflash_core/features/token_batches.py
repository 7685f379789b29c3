"""Samples as tensors: batches by token budget, padded ids, loss masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from dflash_core.types import Sample


def token_batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Runs of neighbors with rows x longest <= `batch_tokens`; a longer sample stands alone."""
    batch: list[Sample] = []
    longest = 0
    for sample in samples:
        longest_with = max(longest, len(sample.input_ids))
        if batch and longest_with * (len(batch) + 1) > batch_tokens:
            yield batch
            batch, longest_with = [], len(sample.input_ids)
        batch.append(sample)
        longest = longest_with
    if batch:
        yield batch


def padded_ids(samples: Sequence[Sample]) -> Tensor:
    """Token ids [samples, longest] (int64), padded on the right with id 0.

    No mask goes with them: causal attention never looks to the right, so the real tokens' hidden
    states are what they would be without the padding.
    """
    ids = torch.zeros(len(samples), max(len(s.input_ids) for s in samples), dtype=torch.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
    return ids


def loss_mask(sample: Sample) -> Tensor:
    """[tokens] bool: where the target itself spoke."""
    mask = torch.zeros(len(sample.input_ids), dtype=torch.bool)
    for start, end in sample.spans:
        mask[start:end] = True
    return mask
