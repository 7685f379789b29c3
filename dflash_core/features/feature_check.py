"""Is a shard that was just written what it was meant to be: reopened and compared with its samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from dflash_core.errors import UserError
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_shards import FeatureShard, tensor_of
from dflash_core.features.finite import first_not_finite
from dflash_core.features.token_batches import loss_mask
from dflash_core.types import Sample

_FLOAT8_NAN = 0x7F


def check_shard(path: Path, meta: FeatureMeta, samples: Sequence[Sample]) -> None:
    """Raise UserError unless the shard holds these samples, in this order, with finite features.

    Compared are the count, ids, domains, token ids and loss masks of all, and that every number is finite.
    """
    shard = FeatureShard(path)
    if shard.meta != meta:
        raise _bad(path, f"its features are of {shard.meta}, not of {meta}")
    if len(shard) != len(samples):
        raise _bad(path, f"it has {len(shard)} of {len(samples)} samples")
    begin = 0
    for batch in shard.batches():
        expected = samples[begin : begin + batch.num_rows]
        _check_samples(path, batch, expected)
        _check_finite(path, batch, expected, meta)
        begin += batch.num_rows


def _check_samples(path: Path, batch: pa.RecordBatch, samples: Sequence[Sample]) -> None:
    if batch.column("id").to_pylist() != [s.id for s in samples]:
        raise _bad(path, f"the samples after {samples[0].id!r} are others")
    ids, masks = batch.column("input_ids"), batch.column("loss_mask")
    for row, sample in enumerate(samples):
        if not np.array_equal(ids[row].values.to_numpy(), sample.input_ids):
            raise _bad(path, f"the token ids of sample {sample.id!r} differ")
        if not torch.equal(tensor_of(masks[row].values), loss_mask(sample)):
            raise _bad(path, f"the loss mask of sample {sample.id!r} differs")
        if batch.column("domain")[row].as_py() != sample.domain:
            raise _bad(path, f"the domain of sample {sample.id!r} differs")


def _check_finite(path: Path, batch: pa.RecordBatch, samples: Sequence[Sample], meta: FeatureMeta) -> None:
    taps, hidden = len(meta.layer_ids), meta.hidden_size
    columns = {"features": (taps, hidden)} | ({"last_hidden": (1, hidden)} if meta.last_hidden else {})
    for name, shape in columns.items():
        values = tensor_of(batch.column(name).values).view(-1, *shape)
        eight_bits = values.dtype == torch.uint8
        where = _first_bad_float8(values) if eight_bits else first_not_finite(values.view(torch.bfloat16))
        if where is not None:
            starts = batch.column("input_ids").offsets.to_numpy()
            sample = samples[int(np.searchsorted(starts, where[0], side="right")) - 1]
            layer = f"layer {meta.layer_ids[where[1]]}" if name == "features" else "the final norm"
            raise _bad(path, f"sample {sample.id!r} has NaN or infinity after {layer}")


def _first_bad_float8(codes: torch.Tensor) -> tuple[int, ...] | None:
    """Index of the first NaN; float8_e4m3fn has no infinity."""
    bad = (codes & _FLOAT8_NAN) == _FLOAT8_NAN
    return tuple(bad.nonzero()[0].tolist()) if bool(bad.any()) else None


def _bad(path: Path, what: str) -> UserError:
    return UserError(f"{path} is not what was written ({what}); check the disk and extract it again")
