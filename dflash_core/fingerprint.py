"""Identity of values: canonical JSON hashed with sha256; refuses a value without one.

Two equal values give one identity on every machine and Python version; anything whose text
could change by itself (an object, a set, a NaN) raises instead of being stringified.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

SHORT = 12
"""Hex digits shown to people and used in names; 48 bits."""


def canonical(value: Any) -> Any:
    """`value` as JSON-able data with one spelling. Raises TypeError or ValueError if it has none."""
    if isinstance(value, Enum):
        return canonical(value.value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} has no stable identity")
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return canonical(asdict(value))
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("only string keys have a stable identity")
        return {key: canonical(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no stable identity: pass plain data")


def fingerprint(value: Any) -> str:
    """sha256 (64 hex digits) of `value`'s canonical JSON."""
    text = json.dumps(canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path, chunk_bytes: int = 1 << 22) -> str:
    """sha256 of a file's bytes, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(chunk_bytes):
            digest.update(chunk)
    return digest.hexdigest()
