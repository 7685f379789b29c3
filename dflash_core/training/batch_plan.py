"""Which documents each training step sees: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BatchPlan:
    """Epochs of shuffled documents cut by a token budget.

    `lengths` [documents], in tokens, is all that it holds of the data; `documents` are the indices to
    draw from, all of them where not given.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_tokens: int,
        seed: int,
        documents: Sequence[int] | None = None,
    ) -> None:
        self._lengths, self._batch_tokens, self._seed = lengths, batch_tokens, seed
        self._documents = range(len(lengths)) if documents is None else documents
        self._epochs: dict[int, list[list[int]]] = {}
        self._first_steps = [0]

    def batch(self, step: int) -> list[int]:
        """Document indices of `step`."""
        epoch = self.epoch(step)
        return self._batches(epoch)[step - self._first_steps[epoch]]

    def epoch(self, step: int) -> int:
        """The pass over the documents that `step` belongs to, counted from 0."""
        epoch = 0
        while True:
            while len(self._first_steps) <= epoch + 1:
                number = len(self._first_steps) - 1
                self._first_steps.append(self._first_steps[-1] + len(self._batches(number)))
            if step < self._first_steps[epoch + 1]:
                return epoch
            epoch += 1

    def _batches(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(mix(self._seed, 1, epoch))
            order = torch.randperm(len(self._documents), generator=generator).tolist()
            batches: list[list[int]] = [[]]
            tokens = 0
            for index in (self._documents[i] for i in order):
                if batches[-1] and tokens + self._lengths[index] > self._batch_tokens:
                    batches.append([])
                    tokens = 0
                batches[-1].append(index)
                tokens += self._lengths[index]
            self._epochs = {epoch: batches}
        return self._epochs[epoch]


def cut(documents: Sequence[int], lengths: Sequence[int], most_tokens: int | None) -> list[list[int]]:
    """Runs of neighbors with at most `most_tokens` together (None: no limit); a longer one stands alone."""
    runs: list[list[int]] = [[]]
    tokens = 0
    for index in documents:
        if most_tokens is not None and runs[-1] and tokens + lengths[index] > most_tokens:
            runs.append([])
            tokens = 0
        runs[-1].append(index)
        tokens += lengths[index]
    return [run for run in runs if run]


def mix(*parts: int) -> int:
    """One 63-bit seed out of several small integers (an FNV-1a walk)."""
    state = 0xCBF29CE484222325
    for part in parts:
        state = ((state ^ part) * 0x100000001B3) % (1 << 63)
    return state
