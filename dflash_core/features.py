"""Feature shards: the target's tapped hidden states, token by token, in plain Arrow.

One row a sample, IPC stream format (what `datasets.Dataset.from_file` reads), memory-mapped and read
without a copy. Hidden states are stored as the bit patterns of bfloat16 in a `large_list<uint16>`:
Arrow has no bfloat16, and float16 overflows on the outlier channels of real models.
"""

from __future__ import annotations

import json
import warnings
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.target import Target
from dflash_core.types import Sample

SCHEMA_VERSION = 2
_META_KEY = b"dflash"

_COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("features", pa.large_list(pa.uint16())),
    ]
)


@dataclass(frozen=True)
class FeatureMeta:
    """What a shard's features are of; written into the Arrow schema and checked on reading."""

    target_fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    schema_version: int = SCHEMA_VERSION

    @property
    def width(self) -> int:
        """Numbers per token: taps x hidden."""
        return len(self.layer_ids) * self.hidden_size


@dataclass(frozen=True)
class FeatureRow:
    """One sample with its features."""

    sample: Sample
    loss_mask: Tensor
    """[tokens] bool: where the target itself spoke."""
    features: Tensor
    """[tokens, taps x hidden] bfloat16, a view of the mapped file."""


def write_shard(path: Path, meta: FeatureMeta, rows: Iterable[tuple[Sample, Tensor]]) -> int:
    """Write samples with their features [tokens, taps x hidden]; returns the number of tokens.

    A batch is written per row, so that memory holds one sample at a time.
    """
    schema = _COLUMNS.with_metadata({_META_KEY: json.dumps(asdict(meta)).encode()})
    tokens = 0
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for sample, features in rows:
            if features.shape != (len(sample.input_ids), meta.width):
                raise ValueError(f"features of {sample.id} have shape {tuple(features.shape)}")
            writer.write_batch(_row_batch(schema, sample, features))
            tokens += len(sample.input_ids)
    return tokens


def _row_batch(schema: pa.Schema, sample: Sample, features: Tensor) -> pa.RecordBatch:
    bits = features.to(torch.bfloat16).contiguous().view(torch.uint16).numpy().reshape(-1)
    offsets = pa.array([0, bits.shape[0]], pa.int64())
    return pa.record_batch(
        [
            pa.array([sample.id], pa.string()),
            pa.array([sample.domain], pa.string()),
            pa.array([np.asarray(sample.input_ids, dtype=np.int32)], pa.list_(pa.int32())),
            pa.array([loss_mask(sample).numpy()], pa.list_(pa.bool_())),
            pa.LargeListArray.from_arrays(offsets, pa.array(bits)),
        ],
        schema=schema,
    )


class FeatureShard:
    """A memory-mapped shard with random access to its rows. Raises UserError if it is unreadable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            source = pa.memory_map(str(path), "r")
            with pa.ipc.open_stream(source) as reader:
                schema = reader.schema
                self._batches = list(reader)
            raw = json.loads((schema.metadata or {})[_META_KEY])
            raw["layer_ids"] = tuple(raw["layer_ids"])
            self.meta = FeatureMeta(**raw)
        except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a readable feature shard ({error}); extract it again") from None
        if self.meta.schema_version != SCHEMA_VERSION:
            raise UserError(
                f"{path} has feature schema {self.meta.schema_version}, this version reads {SCHEMA_VERSION}; "
                "extract it again"
            )

    def __len__(self) -> int:
        return len(self._batches)

    def lengths(self) -> list[int]:
        """Tokens of every row, read without touching the features."""
        return [len(batch.column("input_ids")[0]) for batch in self._batches]

    def longest_span(self) -> int:
        """Most tokens that the target spoke in a row, in any sample."""
        masks = (_mask(batch) for batch in self._batches)
        return max((end - start for mask in masks for start, end in _spans(mask)), default=0)

    def __getitem__(self, index: int) -> FeatureRow:
        batch = self._batches[index]
        ids = batch.column("input_ids")[0].values.to_numpy()
        bits = batch.column("features")[0].values.to_numpy()
        # The mapped buffer is read-only; it is only ever read, and copied when moved to a device.
        features = _read_only(bits).view(torch.bfloat16).view(ids.shape[0], self.meta.width)
        sample = Sample(
            id=batch.column("id")[0].as_py(),
            domain=batch.column("domain")[0].as_py(),
            input_ids=tuple(ids.tolist()),
            spans=_spans(mask := _mask(batch)),
        )
        return FeatureRow(sample, torch.from_numpy(mask), features)


class FeatureSet(Sequence[FeatureRow]):
    """Every row of several shards, in their order. Raises UserError if they are of different targets."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shards = [FeatureShard(path) for path in paths]
        self._ends = list(accumulate(len(shard) for shard in self._shards))
        self.meta = self._shards[0].meta
        for shard in self._shards:
            if shard.meta != self.meta:
                raise UserError(
                    f"{shard.path} holds features of {shard.meta}, the first shard of {self.meta}; "
                    "extract them again together"
                )

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


def loss_mask(sample: Sample) -> Tensor:
    """[tokens] bool: where the target itself spoke."""
    mask = torch.zeros(len(sample.input_ids), dtype=torch.bool)
    for start, end in sample.spans:
        mask[start:end] = True
    return mask


def _mask(batch: pa.RecordBatch) -> np.ndarray:
    """bool [tokens]; Arrow packs bits, so this is a copy, of an eighth of a byte a token."""
    mask: np.ndarray = batch.column("loss_mask")[0].values.to_numpy(zero_copy_only=False)
    return mask


def _spans(mask: np.ndarray) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


def _read_only(bits: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(bits)


def extract(
    target: Target, samples: Iterable[Sample], layer_ids: tuple[int, ...], *, batch_tokens: int
) -> Iterator[tuple[Sample, Tensor]]:
    """Features of each sample, in the order given, [tokens, taps x hidden] on the CPU.

    Neighbors are batched while rows x longest <= `batch_tokens` (feed them sorted by length). They
    are padded on the right, where causal attention leaves the real tokens untouched.
    """
    for batch in token_batches(samples, batch_tokens):
        longest = max(len(s.input_ids) for s in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(batch):
            ids[row, : len(sample.input_ids)] = torch.tensor(sample.input_ids)
            mask[row, : len(sample.input_ids)] = 1
        tapped = target.tap(
            ids.to(target.device), layer_ids, None if bool(mask.all()) else mask.to(target.device)
        )
        features = tapped.to(torch.bfloat16).cpu()
        if not torch.isfinite(features).all():
            names = ", ".join(s.id for s in batch)
            raise UserError(f"the target gives NaN or infinite features on {names}; check the checkpoint")
        for row, sample in enumerate(batch):
            yield sample, features[row, : len(sample.input_ids)]


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
