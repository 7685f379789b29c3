"""What a directory's weights hashed to last time, so that an unchanged one is not read again.

One small JSON file per directory. An entry counts only while every file it was read from has the
same size, times and inode; a file that cannot be understood is ignored and written anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_core.fingerprint import SHORT

VERSION = 1
"""Raise when digests are computed differently."""
Signature = dict[str, list[int]]


def signature(files: Iterable[Path]) -> Signature:
    """Name -> [size, mtime in ns, ctime in ns, inode]: changes whenever a file is written or replaced."""
    found: Signature = {}
    for path in sorted(files):
        status = path.stat()
        found[path.name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    return found


def cache_file(cache_dir: Path, directory: Path) -> Path:
    """Where the digests of `directory` are kept."""
    # Bytes, because a path need not be valid UTF-8.
    name = hashlib.sha256(os.fsencode(os.path.realpath(directory))).hexdigest()[:SHORT]
    return cache_dir / f"digests-{name}.json"


def load_digests(path: Path, files: Signature) -> dict[str, str] | None:
    """The digests stored for exactly these files; None if there are none."""
    try:
        stored = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(stored, dict) or not isinstance(digests := stored.get("digests"), dict):
        return None
    # The seal covers everything, so equality also means version, files and digests are as written.
    return digests if stored == _sealed(files, digests) else None


def store_digests(path: Path, files: Signature, digests: dict[str, str]) -> None:
    """Write atomically: readers see the old file or the new one. Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(_sealed(files, digests), stream)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise


def _sealed(files: Signature, digests: dict[str, str]) -> dict[str, Any]:
    content = {"version": VERSION, "files": files, "digests": digests}
    text = json.dumps(content, sort_keys=True)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}
