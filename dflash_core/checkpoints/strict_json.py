"""JSON that strangers wrote, read so that nothing odd gets through: bounded, finite, no duplicate keys."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError

MEBIBYTE = 1 << 20


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """A regular file's bytes. Raises UserError when it is missing, no regular file or over `max_bytes`."""
    try:
        found = path.stat()
    except OSError:
        raise UserError(f"{path} is missing or cannot be read: copy the whole checkpoint again") from None
    # A pipe or a device would block for ever or never end.
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a regular file: replace it with one")
    if found.st_size > max_bytes:
        raise UserError(
            f"{path} has {found.st_size:,} bytes where at most {max_bytes:,} are plausible: "
            "check that it is the right file"
        )
    return path.read_bytes()


def read_text(path: Path, max_bytes: int) -> str:
    """A UTF-8 file's text. Raises UserError as `read_bytes` does, and when the bytes are not UTF-8."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as UTF-8") from None


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """A file's JSON object. Raises UserError when it cannot be read or is anything else."""
    return parse_object(read_bytes(path, max_bytes), str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; `where` names it in errors.

    Raises UserError on bad UTF-8, bad syntax, a key given twice, NaN or infinite numbers, unpaired
    surrogates, nesting too deep, or a value that is not an object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if b"\\ud" in data or b"\\uD" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise UserError(f"{where} nests its JSON too deeply: save it again") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}): save or download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} holds a JSON {type(value).__name__}, not an object: save it again")
    return value


def one_line(error: BaseException) -> str:
    """What a library said, fit to be quoted inside one sentence."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    keys = [key for key, _ in pairs]
    raise ValueError(f"key {max(keys, key=keys.count)!r} appears twice")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number
