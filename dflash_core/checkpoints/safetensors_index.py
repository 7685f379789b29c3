"""Where every tensor of a checkpoint lies: safetensors headers and the index, checked against the files.

A safetensors file is eight bytes (little-endian header length), a JSON header of name -> dtype,
shape and byte range, then the bytes, back to back. Nothing here reads a weight.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.checkpoints.strict_json import MEBIBYTE, parse_object, read_object
from dflash_core.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The element types a full-precision checkpoint may hold; anything else is quantized or no weight."""
_MAX_HEADER_BYTES = 100 * MEBIBYTE
_MAX_INDEX_BYTES = 64 * MEBIBYTE
_SHARD_NAME = re.compile(r"[A-Za-z0-9][\w.+=-]*\.safetensors", re.ASCII)
_COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's place."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    offset: int
    """From the start of the file, in bytes."""
    num_bytes: int


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor by name, from `model.safetensors` or from the index and all its shards.

    Raises UserError when both or neither exist, a shard is missing, truncated or malformed, or the
    index and the shards disagree.
    """
    single, index = directory / SINGLE, directory / INDEX
    if single.exists() and index.exists():
        raise UserError(f"{directory} holds both {SINGLE} and {INDEX}: remove the stale one")
    if single.exists():
        return read_header(single)
    if not index.exists():
        raise UserError(f"{directory} has shards but no {INDEX}: {_COPY_AGAIN}")
    weight_map = _read_weight_map(index)
    tensors: dict[str, TensorEntry] = {}
    for shard_name in sorted(set(weight_map.values())):
        for name, entry in _read_shard(index, shard_name).items():
            if weight_map.get(name) != shard_name:
                raise UserError(
                    f"{index} does not place tensor {name} in {shard_name}, which holds it: {_COPY_AGAIN}"
                )
            tensors[name] = entry
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        shard_name = weight_map[absent[0]]
        raise UserError(f"{index} places tensor {absent[0]} in {shard_name}, which lacks it: {_COPY_AGAIN}")
    return tensors


def _read_shard(index: Path, shard_name: str) -> dict[str, TensorEntry]:
    shard = index.parent / shard_name
    if not shard.exists():
        raise UserError(f"{index} names the shard {shard_name}, which is missing: {_COPY_AGAIN}")
    return read_header(shard)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, _MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: {_COPY_AGAIN}")
    for name, shard in weight_map.items():
        # A plain name only: no folder, no way out of the directory.
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise UserError(
                f"{index} places tensor {name} in {shard!r}, which is no shard's name: {_COPY_AGAIN}"
            )
    return weight_map


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one file by name. Raises UserError unless the byte ranges tile the file exactly."""
    header, start, size = _read_raw_header(path)
    header.pop("__metadata__", None)
    entries = [_entry(path, name, fields, start) for name, fields in header.items()]
    if not entries:
        raise UserError(f"{path} holds no tensor: {_COPY_AGAIN}")
    position = start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset != position:
            fault = "overlaps the one before" if entry.offset < position else "leaves a gap before"
            raise UserError(f"{path}: tensor {entry.name} {fault}: {_COPY_AGAIN}")
        position += entry.num_bytes
        if position > size:
            raise UserError(
                f"{path} is truncated: tensor {entry.name} ends at byte {position:,} "
                f"of a file of {size:,}: {_COPY_AGAIN}"
            )
    if position < size:
        raise UserError(f"{path} has {size - position:,} bytes after its last tensor: {_COPY_AGAIN}")
    return {entry.name: entry for entry in entries}


def _read_raw_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header's JSON, where the tensors' bytes begin, and the file's size."""
    if not path.is_file():
        raise UserError(f"{path} is not a regular file: {_COPY_AGAIN}")
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or 8 + length > size:
            raise UserError(f"{path} is truncated or no safetensors file ({size:,} bytes): {_COPY_AGAIN}")
        if length > _MAX_HEADER_BYTES:
            raise UserError(f"{path} announces a header of {length:,} bytes: {_COPY_AGAIN}")
        data = stream.read(length)
    return parse_object(data, f"the header of {path}"), 8 + length, size


def _entry(path: Path, name: str, fields: Any, start: int) -> TensorEntry:
    if not isinstance(fields, dict):
        raise UserError(f"{path}: tensor {name} has no description: {_COPY_AGAIN}")
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    span: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UserError(
            f"{path}: tensor {name} is of type {dtype!r}, not one of {', '.join(ITEM_BYTES)}: "
            "pass the unquantized checkpoint"
        )
    if not _is_counts(shape) or len(shape) > 8:
        raise UserError(f"{path}: tensor {name} has shape {shape!r}: {_COPY_AGAIN}")
    if not _is_counts(span) or len(span) != 2:
        raise UserError(f"{path}: tensor {name} has data_offsets {span!r}: {_COPY_AGAIN}")
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if span[1] - span[0] != num_bytes:
        raise UserError(
            f"{path}: tensor {name} of shape {shape} takes {num_bytes:,} bytes but spans "
            f"{span[1] - span[0]:,}: {_COPY_AGAIN}"
        )
    return TensorEntry(name, dtype, tuple(shape), path, start + span[0], num_bytes)


def _is_counts(value: Any) -> bool:
    """A list of whole numbers from 0 to 2**48."""
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= 1 << 48 for item in value
    )
