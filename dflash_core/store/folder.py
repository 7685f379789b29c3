"""A folder of files, on this machine's filesystem or behind any fsspec URL, with what a store needs of it.

Names are relative and use "/". What differs between the two kinds is told by `Folder`: a local folder
has exclusive creation, directory renames and locks; a remote one has whole-object writes and no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol
from urllib.parse import unquote

from dflash_core.errors import UserError
from dflash_core.fingerprint import file_sha256

_CHUNK = 1 << 22
_FILE_SCHEMES = ("file://", "local://")


class Folder(Protocol):
    """What a store needs of the place it stands on. A missing file is None, or nothing to remove."""

    @property
    def location(self) -> str:
        """Path or URL, without a slash at the end."""

    @property
    def renames(self) -> bool:
        """Whether a whole directory can be renamed in one step."""

    def local_path(self) -> Path | None:
        """The folder itself, when it is on this machine's filesystem."""

    def read(self, name: str) -> bytes | None: ...

    def read_tree(self, name: str) -> Iterator[tuple[str, bytes]]:
        """Every file beneath `name`: its name relative to it, and its content. Holds few at a time."""

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Readers see the old content or the new. durable: on the disk when this returns."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist yet; False if it does."""

    def touch(self, name: str) -> None:
        """Make the file if it is missing, and set its modification time to now."""

    def put_file(self, name: str, source: Path, *, move: bool) -> tuple[int, str]:
        """Bring `source` in, whole or not at all, durably; returns its size in bytes and its sha256."""

    def open(self, name: str) -> BinaryIO:
        """A file to be read in pieces. Raises FileNotFoundError."""

    def size(self, name: str) -> int | None:
        """Bytes of a file."""

    def sizes(self, name: str) -> dict[str, int]:
        """Bytes of every file beneath `name`, by its name relative to it."""

    def modified(self, name: str) -> float | None:
        """Modification time in seconds by the storage's own clock; None if it has none."""

    def exists(self, name: str) -> bool: ...

    def remove(self, name: str) -> None: ...

    def remove_tree(self, name: str) -> None: ...

    def prune(self, name: str, keep: Callable[[str], bool]) -> None:
        """Remove every file beneath `name` whose relative name `keep` refuses, and what is then empty."""

    def rename(self, old: str, new: str) -> None:
        """Rename a directory; durable when this returns."""

    def sync_tree(self, name: str) -> None:
        """Make the directories beneath `name` durable."""

    def guard(self, name: str) -> AbstractContextManager[bool]:
        """Keep other processes out; False where the storage has no locks and nobody is kept out."""


def open_folder(location: str) -> Folder:
    """The folder at a path or URL, which need not exist. Raises UserError for a URL that cannot be used."""
    for scheme in _FILE_SCHEMES:
        if location.startswith(scheme):
            path = unquote(location.removeprefix(scheme))
            if not path.startswith("/"):
                raise UserError(f"{location} names no absolute path: write it as {scheme}/path/to/folder")
            return LocalFolder(path.rstrip("/") or "/")
    if "://" in location:
        from dflash_core.store.remote_folder import RemoteFolder

        return RemoteFolder.at(location)
    # Absolute, because workers on the same machine have other working directories.
    return LocalFolder(str(Path(location).expanduser().absolute()))


def copy_stream(reader: IO[bytes], writer: IO[bytes] | None = None) -> tuple[int, str]:
    """Read to the end, writing along if a writer is given; returns the bytes' number and their sha256."""
    digest, num_bytes = hashlib.sha256(), 0
    while chunk := reader.read(_CHUNK):
        digest.update(chunk)
        num_bytes += len(chunk)
        if writer is not None:
            writer.write(chunk)
    return num_bytes, digest.hexdigest()


def temporary_name(name: str) -> str:
    """A name beside `name` that no other writer uses and no stage can."""
    head, slash, base = name.rpartition("/")
    return f"{head}{slash}.{base}.{uuid.uuid4().hex[:8]}.tmp"


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` made it: what a killed writer leaves behind."""
    base = name.rpartition("/")[2]
    return base.startswith(".") and base.endswith(".tmp")


@dataclass(frozen=True)
class LocalFolder:
    """A directory."""

    location: str
    renames = True

    def local_path(self) -> Path | None:
        return Path(self.location)

    def read(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def read_tree(self, name: str) -> Iterator[tuple[str, bytes]]:
        top = self._path(name)
        for directory, _, files in os.walk(top):
            for file in files:
                path = Path(directory, file)
                # A file may go while we look: a temporary one of another writer.
                with contextlib.suppress(FileNotFoundError):
                    yield path.relative_to(top).as_posix(), path.read_bytes()

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        with self._appearing(name) as temporary:
            with temporary.open("xb") as stream:
                stream.write(data)
            if durable:
                _sync(temporary)
        if durable:
            _sync(self._path(name).parent)

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            stream = path.open("xb")
        except FileExistsError:
            return False
        try:
            with stream:
                stream.write(data)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return True

    def touch(self, name: str) -> None:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def put_file(self, name: str, source: Path, *, move: bool) -> tuple[int, str]:
        with self._appearing(name) as temporary:
            if move:
                source.rename(temporary)
                num_bytes, sha256 = temporary.stat().st_size, file_sha256(temporary)
            else:
                with source.open("rb") as reader, temporary.open("xb") as writer:
                    num_bytes, sha256 = copy_stream(reader, writer)
            _sync(temporary)
        return num_bytes, sha256

    def open(self, name: str) -> BinaryIO:
        return self._path(name).open("rb")

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            return path.stat().st_size if path.is_file() else None
        except FileNotFoundError:
            return None

    def sizes(self, name: str) -> dict[str, int]:
        top = self._path(name)
        found = {}
        for directory, _, files in os.walk(top):
            for file in files:
                path = Path(directory, file)
                # A file may go while we look: a temporary one of another writer.
                with contextlib.suppress(FileNotFoundError):
                    found[path.relative_to(top).as_posix()] = path.stat().st_size
        return found

    def modified(self, name: str) -> float | None:
        try:
            return self._path(name).stat().st_mtime
        except FileNotFoundError:
            return None

    def exists(self, name: str) -> bool:
        return self._path(name).exists()

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def remove_tree(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path(name))

    def prune(self, name: str, keep: Callable[[str], bool]) -> None:
        top = self._path(name)
        for directory, folders, files in os.walk(top, topdown=False):
            here = Path(directory)
            for file in files:
                if not keep((here / file).relative_to(top).as_posix()):
                    (here / file).unlink(missing_ok=True)
            for folder in folders:
                path = here / folder
                if path.is_symlink():
                    path.unlink()
                else:
                    with contextlib.suppress(OSError):  # not empty
                        path.rmdir()

    def rename(self, old: str, new: str) -> None:
        self._path(old).rename(self._path(new))
        for directory in (self._path(new).parent, Path(self.location)):
            _sync(directory)

    def sync_tree(self, name: str) -> None:
        for directory, _, _ in os.walk(self._path(name)):
            _sync(Path(directory))

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[bool]:
        path = self._path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            yield _lock(stream)

    def _path(self, name: str) -> Path:
        return Path(self.location, name)

    @contextlib.contextmanager
    def _appearing(self, name: str) -> Iterator[Path]:
        """A temporary path beside `name`, renamed to it at the end, removed when that fails."""
        path, temporary = self._path(name), self._path(temporary_name(name))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _lock(stream: IO[bytes]) -> bool:
    """Wait for the lock. The kernel lets go of it when its holder dies, so it can never be stale."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX)
    except OSError:
        return False  # some network filesystems have no locks
    return True


def _sync(path: Path) -> None:
    """Bring a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
