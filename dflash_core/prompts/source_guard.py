"""Are a source's files still those that were hashed? They are read later, and may be replaced meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dflash_core.errors import UserError

Look = tuple[int, int, int]
"""Size, mtime in ns, inode; not the ctime, which a mere hard link changes."""


def look(files: Iterable[Path]) -> tuple[tuple[Path, Look | None], ...]:
    """What each of `files` looks like; to be taken before any of them is hashed."""
    return tuple((file, _look(file)) for file in files)


def check_unchanged(seen: Iterable[tuple[Path, Look | None]]) -> None:
    """Raise UserError if a file was written, replaced or removed since. Costs one `stat` a file."""
    for file, before in seen:
        if _look(file) != before:
            raise UserError(
                f"{file} changed while it was read; nothing was kept of it: run again when it is complete"
            )


def _look(path: Path) -> Look | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
