"""Read feature shards: memory-mapped, row by row, as views of the file.

Opening a shard reads where its record batches lie and how long its rows are, a few bytes a row; what a
row holds is looked up when it is asked for. Format: `feature_schema.py`.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.features.compact import decode
from dflash_core.features.feature_schema import parse_schema

_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""What an Arrow stream ends with."""


@dataclass(frozen=True)
class FeatureRow:
    """One sample with its features. Tensors are views of the mapped file where not said otherwise."""

    id: str
    domain: str
    input_ids: Tensor
    """[tokens] int32."""
    loss_mask: Tensor
    """[tokens] bool: where the target itself spoke. A copy: Arrow packs bits."""
    features: Tensor
    """[tokens, taps x hidden] bfloat16; a copy where storage is compact."""
    last_hidden: Tensor | None
    """[tokens, hidden] bfloat16, after the final norm; None where it was not kept."""


class FeatureShard:
    """A memory-mapped shard with random access to its rows.

    Raises UserError if it is no whole shard of this schema version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pa.memory_map(str(path), "r").read_buffer()
            self._schema, self._starts, sizes = _scan(self._file)
            self.meta = parse_schema(self._schema)
        except (OSError, pa.ArrowInvalid, ValueError) as error:
            raise UserError(f"{path} is not a readable feature shard ({error}); extract it again") from None
        self._ends = np.cumsum([len(s) for s in sizes], dtype=np.int64)
        """Rows up to and with each record batch."""
        self._lengths = np.concatenate(sizes) if sizes else np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return self._lengths.tolist()

    def longest_span(self) -> int:
        """Most tokens that the target spoke in a row, in any sample."""
        return max((_longest_run(batch.column("loss_mask")) for batch in self.batches()), default=0)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches, in the file's order; views of it."""
        for start in self._starts:
            yield self._batch(start)

    def __getitem__(self, index: int) -> FeatureRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batch(self._starts[number])
        row = index - (int(self._ends[number - 1]) if number else 0)
        tokens = int(self._lengths[index])
        return FeatureRow(
            id=batch.column("id")[row].as_py(),
            domain=batch.column("domain")[row].as_py(),
            input_ids=_view(batch, "input_ids", row),
            loss_mask=_view(batch, "loss_mask", row),
            features=self._features(batch, row, tokens).view(tokens, self.meta.width),
            last_hidden=self._last_hidden(batch, row, tokens),
        )

    def _features(self, batch: pa.RecordBatch, row: int, tokens: int) -> Tensor:
        """[tokens, taps, hidden] bfloat16."""
        stored = _view(batch, "features", row)
        shape = (tokens, len(self.meta.layer_ids), self.meta.hidden_size)
        if self.meta.storage == "bf16":
            return stored.view(torch.bfloat16).view(shape)
        return decode(stored.view(shape), _view(batch, "feature_scales", row).view(shape[:2]))

    def _last_hidden(self, batch: pa.RecordBatch, row: int, tokens: int) -> Tensor | None:
        if not self.meta.last_hidden:
            return None
        return _view(batch, "last_hidden", row).view(torch.bfloat16).view(tokens, self.meta.hidden_size)

    def _batch(self, start: int) -> pa.RecordBatch:
        # A reader of its own each time: a file's position would be shared between threads.
        message = pa.ipc.read_message(pa.BufferReader(self._file.slice(start)))
        return pa.ipc.read_record_batch(message, self._schema)


class FeatureSet(Sequence[FeatureRow]):
    """Every row of several shards, in their order.

    `counts` [shards], where given, is how many rows each must have. Raises UserError if a shard has
    another number of them, or is of another target, other layers or another storage than the first.
    """

    def __init__(self, paths: Sequence[Path], counts: Sequence[int] | None = None) -> None:
        if not paths:
            raise UserError("there is no feature shard to read; extract at least one sample")
        self._shards = [FeatureShard(path) for path in paths]
        self._ends = list(accumulate(len(shard) for shard in self._shards))
        self.meta = self._shards[0].meta
        for shard in self._shards:
            if shard.meta != self.meta:
                raise UserError(
                    f"{shard.path} holds features of {shard.meta}, the first shard of {self.meta}; "
                    "extract them again together"
                )
        for shard, count in zip(self._shards, counts or map(len, self._shards), strict=True):
            if len(shard) != count:
                raise UserError(f"{shard.path} has {len(shard)} of {count} samples; extract it again")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> FeatureRow:  # type: ignore[override]
        number = bisect_right(self._ends, index)
        return self._shards[number][index - (self._ends[number - 1] if number else 0)]

    def lengths(self) -> list[int]:
        """Tokens of every row."""
        return [n for shard in self._shards for n in shard.lengths()]

    def longest_span(self) -> int:
        """Most tokens that the target spoke in a row, in any sample."""
        return max(shard.longest_span() for shard in self._shards)


def _scan(file: pa.Buffer) -> tuple[pa.Schema, list[int], list[np.ndarray]]:
    """The schema, where each record batch begins, and the tokens of each of its rows.

    Raises ValueError or ArrowInvalid for a stream that does not reach its end. Of the bodies only the
    pages that hold the lengths are read.
    """
    if file.size < len(_END) or file.slice(file.size - len(_END)).to_pybytes() != _END:
        raise ValueError("it does not end as an Arrow stream does")
    source = pa.BufferReader(file)
    schema = pa.ipc.read_schema(source)
    parse_schema(schema)
    starts, sizes = [], []
    while (start := source.tell()) < file.size - len(_END):
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
        starts.append(start)
        sizes.append(np.diff(batch.column("input_ids").offsets.to_numpy()))
    return schema, starts, sizes


def _view(batch: pa.RecordBatch, column: str, row: int) -> Tensor:
    """The flat values of one row; a view of the mapped file, except for booleans."""
    return tensor_of(batch.column(column)[row].values)


def tensor_of(values: pa.Array) -> Tensor:
    """A flat column's values as a tensor, without a copy unless they are booleans.

    The mapped file is read-only. torch knows no such tensor, so nobody may write to one.
    """
    array = values.to_numpy(zero_copy_only=not pa.types.is_boolean(values.type))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(array)


def _longest_run(masks: pa.ListArray) -> int:
    """Most true values in a row, in any of the lists."""
    values = masks.values.to_numpy(zero_copy_only=False)
    # A false one before every list, and after the last, keeps runs from crossing.
    padded = np.insert(values, masks.offsets.to_numpy(), False)
    edges = np.flatnonzero(np.diff(padded))
    return int((edges[1::2] - edges[::2]).max(initial=0))
