"""A full, read-only or forbidden disk is the user's to mend: said in one sentence instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import DFlashError, UserError

_FREE_SPACE = "free space there or pass another --store"
_MAKE_WRITABLE = "make it writable or pass another --store"
_ANYWHERE = {
    errno.ENOSPC: ("is full", _FREE_SPACE),
    errno.EDQUOT: ("is over its quota", _FREE_SPACE),
    errno.EROFS: ("is read-only", _MAKE_WRITABLE),
}
"""Believed of any path: what a stage writes goes to its store or to temporary files."""
_IN_STORE = {
    errno.EACCES: ("may not be written by this user", _MAKE_WRITABLE),
    errno.EPERM: ("may not be written by this user", _MAKE_WRITABLE),
    errno.ENOTDIR: ("is not a directory", "pass a folder as --store"),
}
"""Believed only of paths in the store: anywhere else it may be an input that cannot be read."""


@contextlib.contextmanager
def explained(location: str) -> Iterator[None]:
    """Turn errors of the storage into UserError; `location` is the store's path or URL."""
    try:
        yield
    except DFlashError:
        raise
    except Exception as error:
        explanation = explain(error, location)
        if explanation is None:
            raise
        raise UserError(explanation) from error


def explain(error: BaseException, location: str) -> str | None:
    """One sentence with the remedy; None if this is no such error."""
    for link in _chain(error):
        path = _path_of(link)
        in_store = path is not None and Path(path).is_relative_to(location)
        known = _ANYWHERE | _IN_STORE if in_store else _ANYWHERE
        code = _code_of(link)
        if code in known:
            what, remedy = known[code]
            place, where = (location, "the store ") if in_store or path is None else (path, "")
            free = _free(place) if remedy == _FREE_SPACE else ""
            return f"{where}{place} {what}{free}: {remedy}, and rerun"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error` and its causes; Ray keeps the cause of a remote error in an attribute."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        cause = getattr(link, "cause", None)
        link = cause if isinstance(cause, BaseException) else link.__cause__


def _code_of(error: BaseException) -> int | None:
    code = error.errno if isinstance(error, OSError) else None
    if code is None:
        # Libraries in Rust and C++ keep the system's text but not its number.
        code = next((c for c in _ANYWHERE if os.strerror(c) in str(error)), None)
    return code


def _path_of(error: BaseException) -> str | None:
    name = getattr(error, "filename", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes)) else None


def _free(path: str) -> str:
    """How much space is free there, in brackets; nothing where that cannot be told."""
    try:
        usage = shutil.disk_usage(next(p for p in (Path(path), *Path(path).parents) if p.exists()))
    except (OSError, StopIteration):
        return ""
    return f" ({usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free without what did not fit)"
