"""Write a shard of features: one record batch for each forward pass, while the next one runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from dflash_core.features.compact import encode
from dflash_core.features.feature_schema import FeatureMeta, arrow_schema
from dflash_core.features.token_batches import loss_mask
from dflash_core.types import Sample


@dataclass(frozen=True)
class FeatureBatch:
    """The samples of one forward pass with their hidden states, one after the other without padding."""

    samples: list[Sample]
    features: Tensor
    """[tokens of all samples, taps, hidden] bfloat16, contiguous, on the CPU."""
    last_hidden: Tensor | None = None
    """[tokens of all samples, hidden] bfloat16, likewise."""

    def rows(self) -> Iterator[tuple[Sample, Tensor]]:
        """Each sample with its features [tokens, taps x hidden]."""
        lengths = [len(s.input_ids) for s in self.samples]
        yield from zip(self.samples, self.features.flatten(1).split(lengths), strict=True)


def write_shard(path: Path, meta: FeatureMeta, batches: Iterable[FeatureBatch]) -> int:
    """Write a shard; returns the number of tokens. The same batches give the same bytes.

    A thread encodes and writes a batch while the caller's iterator makes the next one: two batches
    are in memory, never more.
    """
    schema = arrow_schema(meta)
    tokens = 0
    writing: Future[None] | None = None
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
        ThreadPoolExecutor(1) as thread,
    ):
        for batch in batches:
            count = sum(len(s.input_ids) for s in batch.samples)
            if batch.features.shape != (count, len(meta.layer_ids), meta.hidden_size):
                raise ValueError(f"features of {count} tokens have shape {tuple(batch.features.shape)}")
            if writing is not None:
                writing.result()
            writing = thread.submit(_write, writer, schema, meta, batch)
            tokens += count
            del batch
        if writing is not None:
            writing.result()
    return tokens


def _write(writer: pa.RecordBatchWriter, schema: pa.Schema, meta: FeatureMeta, batch: FeatureBatch) -> None:
    writer.write_batch(_record_batch(schema, meta, batch))


def _record_batch(schema: pa.Schema, meta: FeatureMeta, batch: FeatureBatch) -> pa.RecordBatch:
    samples = batch.samples
    offsets = np.cumsum([0, *(len(s.input_ids) for s in samples)])
    ids = np.fromiter((i for s in samples for i in s.input_ids), dtype=np.int32, count=int(offsets[-1]))
    masks = torch.cat([loss_mask(s) for s in samples]).numpy()
    short = pa.array(offsets, pa.int32())
    columns = [
        pa.array([s.id for s in samples], pa.string()),
        pa.array([s.domain for s in samples], pa.string()),
        pa.ListArray.from_arrays(short, pa.array(ids)),
        pa.ListArray.from_arrays(short, pa.array(masks)),
    ]
    if meta.storage == "compact":
        columns += [_flat(offsets, part) for part in encode(batch.features)]
    else:
        columns.append(_flat(offsets, batch.features.view(torch.uint16)))
    if meta.last_hidden:
        if batch.last_hidden is None:
            raise ValueError("the last hidden states are missing")
        columns.append(_flat(offsets, batch.last_hidden.view(torch.uint16)))
    return pa.record_batch(columns, schema=schema)


def _flat(offsets: np.ndarray, values: Tensor) -> pa.LargeListArray:
    """`values` [tokens, ...] as one list a sample, without a copy."""
    per_token = values[0].numel()
    return pa.LargeListArray.from_arrays(
        pa.array(offsets * per_token, pa.int64()), pa.array(values.reshape(-1).numpy())
    )
