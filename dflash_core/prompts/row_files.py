"""Rows of local files, read as their names end: JSON lines, a JSON list, Parquet, Arrow, a folder of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from dflash_core.checkpoints.strict_json import one_line
from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import (
    MAX_LINE_BYTES,
    Rows,
    Unreadable,
    an_object,
    json_line_rows,
    parse_row,
)

_BATCH_ROWS = 256
_CHUNK = 1 << 20
_NO_VALUE = (ValueError, ArithmeticError, TypeError, LookupError, NotImplementedError)
"""What Arrow raises for a value that Python cannot hold; errors of its own are of these kinds too."""
_NOT_ROWS = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What `datasets` writes beside its rows."""


def file_rows(path: Path) -> Rows:
    """The rows of one file. Raises UserError if it cannot be read."""
    return _reader(path)(path)


def known_files(folder: Path) -> list[Path]:
    """The files with rows below `folder`, in the order of their names. Raises UserError if there are none."""
    found = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and _ending(path) in _READERS and path.name not in _NOT_ROWS
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not found:
        raise UserError(f"{folder} has no file of prompts in it; put {', '.join(_READERS)} files there")
    return found


def without_nulls(value: Any) -> Any:
    """`value` less the keys that are null: columns of Arrow have every key in every row."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _ending(path: Path) -> str:
    suffixes = path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]
    return "".join(suffixes).lower()


def _reader(path: Path) -> Callable[[Path], Rows]:
    reader = _READERS.get(_ending(path))
    if reader is None:
        # A pipe or a file without an ending holds JSON lines.
        if path.suffix:
            raise UserError(
                f"{path} is of no kind known here; pass {', '.join(_READERS)}, or a folder of them"
            )
        return json_line_rows
    return reader


def _json_rows(path: Path) -> Rows:
    """Objects of one list, read piece by piece; a file that begins with an object holds JSON lines."""
    try:
        with path.open(encoding="utf-8-sig") as stream:
            start = stream.read(_CHUNK).lstrip()
            if not start.startswith("["):
                yield from json_line_rows(path)
                return
            for number, text in enumerate(_items(start[1:], stream.read, path), start=1):
                where = f"{path} row {number}"
                yield where, parse_row(text, where)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its rights") from None


def _items(buffer: str, read: Callable[[int], str], path: Path) -> Iterator[str]:
    """The texts of a JSON list's items; `buffer` is what follows its bracket."""
    number = 0
    buffer = _filled(buffer, read)
    mark = "]" if buffer.startswith("]") else ","
    while mark == ",":
        number += 1
        item, buffer = _item(buffer, read, f"{path} row {number}")
        yield item
        buffer = _filled(buffer, read)
        mark = buffer[:1]
        if mark not in (",", "]"):
            raise UserError(
                f"{path} has neither a comma nor the list's end after row {number}; save the list again, "
                "or one object a line as .jsonl"
            )
        buffer = _filled(buffer[1:], read) if mark == "," else buffer
    if _filled(buffer[1:], read):
        raise UserError(
            f"{path} goes on after its list's end (row {number}); save it again as one list, "
            "or one object a line as .jsonl"
        )


def _item(buffer: str, read: Callable[[int], str], where: str) -> tuple[str, str]:
    """The text of the item that `buffer` begins with, and what follows it."""
    decoder = json.JSONDecoder()
    while True:
        try:
            _, end = decoder.raw_decode(buffer)
        except (ValueError, RecursionError) as error:
            more = read(_CHUNK) if len(buffer) <= MAX_LINE_BYTES else ""
            if not more:
                raise UserError(
                    f"{where} is not JSON ({one_line(error)}), or longer than "
                    f"{MAX_LINE_BYTES >> 20} MiB; save the list again, or one object a line as .jsonl"
                ) from None
            buffer += more
        else:
            return buffer[:end], buffer[end:]


def _filled(buffer: str, read: Callable[[int], str]) -> str:
    """`buffer` from its first character that is not blank; empty at the file's end only."""
    buffer = buffer.lstrip(" \t\r\n")
    while not buffer and (more := read(_CHUNK)):
        buffer = more.lstrip(" \t\r\n")
    return buffer


def _parquet_rows(path: Path) -> Rows:
    import pyarrow.parquet as pq

    def batches() -> Iterator[Any]:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_BATCH_ROWS)

    return _batch_rows(path, batches())


def _arrow_rows(path: Path) -> Rows:
    """Of a stream or of a file: both are called .arrow."""
    import pyarrow as pa

    def batches() -> Iterator[Any]:
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_file(source)
            except pa.ArrowInvalid:
                source.seek(0)
                yield from pa.ipc.open_stream(source)
            else:
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))

    return _batch_rows(path, batches())


def _batch_rows(path: Path, batches: Iterable[Any]) -> Rows:
    import pyarrow as pa

    number = 0
    try:
        for batch in batches:
            for start in range(0, batch.num_rows, _BATCH_ROWS):
                for row in _rows_of(batch.slice(start, _BATCH_ROWS)):
                    number += 1
                    where = f"{path} row {number}"
                    yield where, an_object(without_nulls(row), where)
    except FileNotFoundError:
        raise UserError(f"there is no prompt file {path}; check the path") from None
    # A damaged file may have, for one, a column's name that is no text.
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read after row {number} ({one_line(error)}); write the file again"
        ) from None


def _rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    columns = [_values(column) for column in batch.columns]
    return (dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True))


def _values(column: Any) -> list[Any]:
    """A column's values, each on its own where some cannot be had: bytes that are no text, an odd date."""
    try:
        return cast("list[Any]", column.to_pylist())
    except _NO_VALUE:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except _NO_VALUE as error:
        return Unreadable(one_line(error))


_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": json_line_rows,
    ".jsonl.gz": json_line_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}
