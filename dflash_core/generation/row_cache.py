"""A KV cache whose rows have lengths of their own: rows come, go, grow and are cut back independently.

Row r's token at position p lies at index p, so that forgetting tokens is a smaller length and nothing
else. A forward writes its new tokens behind each row's length; `keep` then says how many of them stay.
What stands behind a row's length is left over and never attended to (`visible`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

STEP = 128
"""Tokens by which the room of all rows grows: each time what is there is copied."""


class RowCache(Cache):
    """The keys and values of rows that continue independently."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.device = device
        self.lengths: list[int] = []
        """Tokens kept, by row."""
        self._rows = torch.empty(0, 1, dtype=torch.int64, device=device)
        self._positions = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._span = 0
        self._room = 0, 0
        self._kept = [_RowLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self._kept))

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def add_rows(self, count: int) -> None:
        """`count` empty rows, behind those that are there."""
        self.lengths += [0] * count

    def begin(self, num_new: int) -> Tensor:
        """Make room for `num_new` more tokens in every row; their positions [rows, num_new]."""
        lengths = torch.tensor(self.lengths, device=self.device)
        self._rows = torch.arange(self.num_rows, device=self.device)[:, None]
        self._positions = lengths[:, None] + torch.arange(num_new, device=self.device)
        self._span = max(self.lengths) + num_new
        self.reserve(self.num_rows, self._span)
        return self._positions

    def visible(self, window: int | None = None) -> Tensor:
        """What the tokens of the last `begin` attend to: bool [rows, 1, new, span].

        Each sees its own row up to itself; with `window`, only so many tokens, itself included.
        """
        keys = torch.arange(self._span, device=self.device)
        queries = self._positions[:, None, :, None]
        mask = keys <= queries
        return mask if window is None else mask & (keys > queries - window)

    def keep(self, counts: Sequence[int]) -> None:
        """Of the tokens of the last forward, row r's first `counts[r]` stay."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def crop(self, lengths: Sequence[int]) -> None:  # type: ignore[override]  # transformers crops all rows alike
        """Forget everything past each row's first `lengths[r]` tokens."""
        self.lengths = [min(pair) for pair in zip(self.lengths, lengths, strict=True)]

    def drop(self, rows: Sequence[int]) -> None:
        """Take rows out; the last rows move into their places. `moves` tells which."""
        for row, last in moves(self.num_rows, rows):
            for layer in self._kept:
                layer.move(last, row, self.lengths[last])
            self.lengths[row] = self.lengths[last]
        del self.lengths[self.num_rows - len(set(rows)) :]

    def append(self, other: RowCache) -> None:
        """Copy the rows of `other` behind the own ones."""
        first = self.num_rows
        self.reserve(first + other.num_rows, max((*self.lengths, *other.lengths)))
        for layer, source in zip(self._kept, other._kept, strict=True):
            layer.put(first, source, other.num_rows, max(other.lengths))
        self.lengths += other.lengths

    def reserve(self, rows: int, length: int) -> None:
        """Memory for so many rows of that length (tokens, rounded up), if there is not enough already.

        What is needed no more is given back then: many short rows after few long ones take no more memory
        than either.
        """
        if rows > self._room[0] or length > self._room[1]:
            self._room = rows, -(-length // STEP) * STEP
            for layer in self._kept:
                layer.resize()

    # What layers ask of their cache.

    @property
    def room(self) -> tuple[int, int]:
        """Rows and tokens that there is memory for."""
        return self._room

    @property
    def places(self) -> tuple[Tensor, Tensor, int]:
        """Of the forward under way: rows [rows, 1], positions [rows, new], and the span attended to."""
        return self._rows, self._positions, self._span


class _RowLayer(CacheLayerMixin):
    """One layer's keys and values, each [rows, heads, tokens, head size]."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: RowCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, length = self.cache.room
        # Zeros: attention multiplies what is masked by 0, and a NaN left in the memory would survive it.
        self.keys, self.values = (
            torch.zeros(rows, s.shape[1], length, s.shape[3], dtype=s.dtype, device=s.device)
            for s in (key_states, value_states)
        )
        self.is_initialized = True

    def resize(self) -> None:
        if not self.is_initialized:
            return
        old = self.keys, self.values
        self.lazy_initialization(*old)
        for new, before in zip((self.keys, self.values), old, strict=True):
            rows, length = min(new.shape[0], before.shape[0]), min(new.shape[2], before.shape[2])
            new[:rows, :, :length] = before[:rows, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens; everything that the forward's rows may attend to, the new ones included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions, span = self.cache.places
        # Of a target spread over several GPUs, a layer keeps its own states where it runs.
        rows, positions = rows.to(self.keys.device), positions.to(self.keys.device)
        self.keys[rows, :, positions] = key_states.transpose(1, 2)
        self.values[rows, :, positions] = value_states.transpose(1, 2)
        count = rows.shape[0]
        return self.keys[:count, :, :span], self.values[:count, :, :span]

    def move(self, source: int, row: int, length: int) -> None:
        self.keys[row, :, :length] = self.keys[source, :, :length]
        self.values[row, :, :length] = self.values[source, :, :length]

    def put(self, first: int, source: _RowLayer, count: int, length: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(source.keys, source.values)
        self.keys[first : first + count, :, :length] = source.keys[:count, :, :length]
        self.values[first : first + count, :, :length] = source.values[:count, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return max(self.cache.lengths, default=0) + query_length, 0

    def get_seq_length(self) -> int:
        return max(self.cache.lengths, default=0)

    def get_max_length(self) -> int:
        return -1


def moves(num_rows: int, dropped: Sequence[int]) -> list[tuple[int, int]]:
    """(place, row that moves there) so that the rows left are the first ones and few of them move."""
    gone = set(dropped)
    left = num_rows - len(gone)
    holes = sorted(row for row in gone if row < left)
    movers = [row for row in range(left, num_rows) if row not in gone]
    return list(zip(holes, movers, strict=True))
