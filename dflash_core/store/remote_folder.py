"""A folder behind an fsspec URL: object stores above all, and whatever else fsspec speaks to.

Object stores show an object only when it is uploaded whole. Other protocols may show half a file, which
is why nothing in a store counts before the record or marker that is written after it. fsspec is imported
when the first URL is opened.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dflash_core.errors import UserError
from dflash_core.fingerprint import file_sha256

_AT_ONCE = 1_000
"""Files that are read together."""


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix of a filesystem that fsspec speaks to."""

    location: str
    fs: Any
    root: str
    renames = False

    @classmethod
    def at(cls, location: str) -> RemoteFolder:
        """Raises UserError if fsspec does not know the protocol, lacks its package or refuses the URL."""
        from fsspec.core import url_to_fs

        try:
            fs, root = url_to_fs(location)
        except ImportError as error:
            raise UserError(f"{location} needs a package that is not installed: {error}") from None
        except ValueError as error:
            raise UserError(f"{location} cannot be used ({error}): pass a folder or an fsspec URL") from None
        return cls(location.rstrip("/"), fs, root.rstrip("/"))

    def local_path(self) -> Path | None:
        return None

    def read(self, name: str) -> bytes | None:
        try:
            data = self.fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return bytes(data)

    def read_tree(self, name: str) -> Iterator[tuple[str, bytes]]:
        top = self._path(name)
        files = list(self.sizes(name))
        for start in range(0, len(files), _AT_ONCE):
            # One call for many of them: asynchronous backends read in parallel.
            found = self.fs.cat([f"{top}/{file}" for file in files[start : start + _AT_ONCE]])
            for path, data in found.items():
                yield path[len(top) + 1 :], bytes(data)

    def write(self, name: str, data: bytes, *, durable: bool = True) -> None:
        del durable  # an upload that has returned is durable
        self._make_parent(name)
        self.fs.pipe_file(self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        self._make_parent(name)
        try:
            self.fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    def touch(self, name: str) -> None:
        self.write(name, b"")

    def put_file(self, name: str, source: Path, *, move: bool) -> tuple[int, str]:
        del move  # nothing to move: it is uploaded
        num_bytes, sha256 = source.stat().st_size, file_sha256(source)
        self._make_parent(name)
        self.fs.put_file(str(source), self._path(name))
        if (arrived := self.size(name)) != num_bytes:
            raise OSError(errno.EIO, f"{arrived} of {num_bytes} bytes arrived", f"{self.location}/{name}")
        return num_bytes, sha256

    def open(self, name: str) -> BinaryIO:
        stream: BinaryIO = self.fs.open(self._path(name), "rb")
        return stream

    def size(self, name: str) -> int | None:
        try:
            info = self._fresh().info(self._path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def sizes(self, name: str) -> dict[str, int]:
        top = self._path(name)
        try:
            found = self._fresh().find(top, detail=True)
        except FileNotFoundError:
            return {}
        prefix = top + "/"
        return {
            path[len(prefix) :]: int(info["size"]) for path, info in found.items() if path.startswith(prefix)
        }

    def modified(self, name: str) -> float | None:
        try:
            return float(self._fresh().modified(self._path(name)).timestamp())
        except (FileNotFoundError, NotImplementedError):
            return None

    def exists(self, name: str) -> bool:
        return self.size(name) is not None or bool(self.sizes(name))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))

    def remove_tree(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self._path(name), recursive=True)

    def prune(self, name: str, keep: Callable[[str], bool]) -> None:
        for file in self.sizes(name):
            if not keep(file):
                self.remove(f"{name}/{file}".lstrip("/"))

    def rename(self, old: str, new: str) -> None:
        """A copy and a removal, file by file: never the way to commit."""
        self.fs.mv(self._path(old), self._path(new), recursive=True)

    def sync_tree(self, name: str) -> None:
        """Nothing to do: uploads are durable."""

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[bool]:
        del name
        yield False

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _fresh(self) -> Any:
        """The filesystem without its listing cache: other machines write to it too."""
        self.fs.invalidate_cache()
        return self.fs

    def _make_parent(self, name: str) -> None:
        self.fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
