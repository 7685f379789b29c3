"""JSON lines, read strictly and one at a time: a line that cannot be used is named by file and number."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from dflash_core.errors import UserError

MAX_LINE_BYTES = 4 << 20
"""A longer line is no prompt: longer than any context, and a binary file has no line ends at all."""


@dataclass(frozen=True)
class Unreadable:
    """Stands in a row for a value that could not be read."""

    why: str


Rows = Iterator[tuple[str, dict[str, Any]]]
"""Where a row stands, for messages about it, and the row."""


def json_line_rows(path: Path) -> Rows:
    """The objects of a JSON lines file, gzipped where its name ends in .gz; blank lines are skipped.

    Raises UserError if the file cannot be read or a line holds no JSON object.
    """
    for number, line in _numbered_lines(path):
        where = f"{path} line {number}"
        yield where, parse_row(line, where)


def parse_row(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises UserError."""
    try:
        row = json.loads(text)
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not JSON ({error.msg} at column {error.colno}); "
            "put one whole JSON object on each line"
        ) from None
    except UnicodeEncodeError:
        # JSON can escape half a character, which no tokenizer takes.
        raise UserError(f"{where} escapes half a surrogate pair; replace that character") from None
    except (RecursionError, ValueError):
        raise UserError(
            f"{where} nests too deeply or has an endless number; write one plain object on each line"
        ) from None
    return an_object(row, where)


def an_object(row: Any, where: str) -> dict[str, Any]:
    """`row` if it is a JSON object. Raises UserError."""
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is a JSON {kind(row)} where an object is needed; "
            'give it "turns": ["user message"] or "messages"'
        )
    return row


def shown(text: str) -> str:
    """A stranger's text, quoted on one line and cut."""
    return json.dumps(text if len(text) <= 40 else f"{text[:40]}...", ensure_ascii=False)


def kind(value: Any) -> str:
    """What JSON calls a value of this type."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1, one in memory at a time."""
    try:
        with _open(path) as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                text = _decode(line, path, number)
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        raise UserError(f"there is no prompt file {path}; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; name a JSON lines file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is no whole gzip file ({error}); compress it again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its rights") from None


def _open(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _decode(line: bytes, path: Path, number: int) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise UserError(
            f"{path} line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; "
            "put each prompt on a line of its own"
        )
    try:
        # Editors on Windows put a byte order mark before the first line.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text (see line {number}); save it as UTF-8") from None
