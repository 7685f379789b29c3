"""One pass over the weights: a digest per tensor, and no NaN or infinity among them.

The digest covers dtype, shape and bytes, so it does not see sharding, path or metadata.
Bytes are read in fixed parts on several threads (reading, sha256 and numpy all release the GIL);
memory stays at one small buffer a thread whatever the checkpoint's size.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflash_core.checkpoints.safetensors_index import TensorEntry
from dflash_core.errors import UserError
from dflash_core.fingerprint import fingerprint

PART_BYTES = 64 << 20
"""What one task hashes. Part of every digest: changing it changes all fingerprints."""
_READ_BYTES = 1 << 20
"""Small enough to be in cache still when the finite check follows the hash."""
_EXPONENT: dict[str, tuple[np.dtype[np.unsignedinteger], int]] = {
    "F64": (np.dtype("<u8"), 0x7FF0_0000_0000_0000),
    "F32": (np.dtype("<u4"), 0x7F80_0000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
}
"""The bits of the exponent: all of them set means NaN or infinity in every IEEE format."""


@dataclass(frozen=True)
class _Part:
    entry: TensorEntry
    offset: int
    num_bytes: int


def digest_tensors(entries: Iterable[TensorEntry], num_threads: int | None = None) -> dict[str, str]:
    """Name -> sha256 (64 hex digits) of each tensor.

    Raises UserError naming the first tensor, by name, that holds NaN or infinity, or a file that
    ends early.
    """
    ordered = sorted(entries, key=lambda entry: entry.name)
    parts = [part for entry in ordered for part in _parts(entry)]
    threads = num_threads or min(16, len(os.sched_getaffinity(0)))
    with ExitStack() as stack, ThreadPoolExecutor(threads) as pool:
        files = {shard: stack.enter_context(shard.open("rb")) for shard in {entry.shard for entry in ordered}}
        results = list(pool.map(lambda part: _digest_part(files[part.entry.shard].fileno(), part), parts))
    digests: dict[str, list[str]] = defaultdict(list)
    broken: dict[str, Path] = {}
    for part, (digest, finite) in zip(parts, results, strict=True):
        digests[part.entry.name].append(digest)
        if not finite:
            broken.setdefault(part.entry.name, part.entry.shard)
    if broken:
        name = next(iter(broken))
        others = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UserError(
            f"{broken[name]}: tensor {name}{others} holds NaN or infinity: pass an earlier checkpoint"
        )
    return {entry.name: fingerprint([entry.dtype, entry.shape, digests[entry.name]]) for entry in ordered}


def _parts(entry: TensorEntry) -> Iterator[_Part]:
    for begin in range(0, entry.num_bytes, PART_BYTES):
        yield _Part(entry, entry.offset + begin, min(PART_BYTES, entry.num_bytes - begin))


def _digest_part(descriptor: int, part: _Part) -> tuple[str, bool]:
    """(sha256 of the part, whether all its numbers are finite)."""
    dtype, exponent = _EXPONENT[part.entry.dtype]
    digest, finite = hashlib.sha256(), True
    buffer = memoryview(bytearray(min(_READ_BYTES, part.num_bytes)))
    done = 0
    while done < part.num_bytes:
        view = buffer[: part.num_bytes - done]
        _read_exactly(descriptor, view, part.offset + done, part.entry)
        digest.update(view)
        finite = finite and bool((np.frombuffer(view, dtype) & exponent).max() != exponent)
        done += len(view)
    return digest.hexdigest(), finite


def _read_exactly(descriptor: int, view: memoryview, offset: int, entry: TensorEntry) -> None:
    # Reads, not mmap: a file cut short meanwhile must be an error, not a bus fault.
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            raise UserError(f"{entry.shard} ended inside tensor {entry.name}: wait for its writer to finish")
        filled += count
