"""A drafter's directory as the registry keeps it: which files, which sha256, and are they still the same."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dflash_core.errors import UserError
from dflash_core.fingerprint import file_sha256


def hash_files(directory: Path) -> dict[str, str]:
    """Path inside `directory` (with `/`) -> sha256. Raises UserError if it is empty or holds a link."""
    if not directory.is_dir():
        raise UserError(f"the drafter {directory} is no directory; pass the folder with its config.json")
    hashes = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise UserError(f"{path} in the drafter is no plain file; replace it by a copy")
        if path.is_file():
            hashes[path.relative_to(directory).as_posix()] = file_sha256(path)
    if not hashes:
        raise UserError(f"the drafter {directory} is empty; pass the folder with its config.json")
    return hashes


def fetch_verified(fetch: Callable[[Path], Path], into: Path, expected: Mapping[str, str]) -> Path:
    """Lets `fetch` download into a folder beside `into`, and moves the result there only if it is `expected`.

    `fetch` gets an empty folder and returns the directory in it that holds the files. `into` must not exist,
    or be an empty directory; on any failure nothing is left in it. Raises UserError naming the first wrong
    file.
    """
    if into.exists() and not (into.is_dir() and not any(into.iterdir())):
        raise UserError(f"{into} is there already; pass a folder that does not exist yet")
    into.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{into.name}-", dir=into.parent))
    try:
        landing = scratch / "files"
        landing.mkdir()  # unlike `scratch`, with the rights that the user's umask gives
        fetched = fetch(landing)
        _compare(hash_files(fetched), expected)
        fetched.replace(into)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return into


def _compare(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    if wrong:
        raise UserError(
            f"{wrong[0]} is not the file that was registered (found sha256 {found.get(wrong[0])}, "
            f"recorded {expected.get(wrong[0])}); restore the artifact or serve another version"
        )
