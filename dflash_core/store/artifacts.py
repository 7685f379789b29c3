"""What stages leave behind: directories named by their inputs, committed by a marker, verified by sha256.

A store holds `<stage>/<identity>/` with the stage's files, a `manifest.json` that lists each with size and
sha256, and `_SUCCESS`, written last, which holds the manifest's own sha256. Without that marker there is
no artifact. How one comes about is told in `attempt.py`; leases stand under `leases/`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.errors import DFlashError, UserError
from dflash_core.fingerprint import SHORT
from dflash_core.store.folder import Folder, copy_stream, open_folder, temporary_name
from dflash_core.store.lease import Lease
from dflash_core.store.storage_errors import explain
from dflash_core.store.workspace import MANIFEST, SUCCESS, FileRecord, Workspace, check_name

__all__ = ["Artifact", "DamagedArtifactError", "FileRecord", "Lease", "Store", "Workspace"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_PROBE_BYTES = 4096


class DamagedArtifactError(DFlashError):
    """A committed artifact is no longer as it was written."""

    location: str = ""
    """Of the artifact."""
    name: str = ""
    """Of its file."""


@dataclass(frozen=True)
class Artifact:
    """The committed output of a stage."""

    stage: str
    identity: str
    location: str
    """Its directory: local path or URL."""
    meta: dict[str, Any]
    """What the stage said about its output."""
    inputs: dict[str, Any]
    files: tuple[FileRecord, ...]
    seconds: float
    """Wall time of the run that finished it."""
    digest: str
    """sha256 of the manifest, hence of everything in it."""

    def local(self, name: str) -> Path:
        """One file on this machine, in place or fetched, its sha256 verified. `name` must be in `files`.

        Raises DamagedArtifactError if it is not what was written.
        """
        record = next(record for record in self.files if record.name == name)
        return self._local_file(record, verify=True)

    def local_dir(self, verify: bool = True) -> Path:
        """The directory on this machine: itself, or a copy in the cache. Not to be written to.

        verify: read every file and compare its sha256. Raises DamagedArtifactError.
        """
        for record in self.files:
            self._local_file(record, verify=verify)
        return self._local_root()

    def verify(self) -> None:
        """Read every file where it is stored. Raises DamagedArtifactError that names the first bad one."""
        folder = open_folder(self.location)
        for record in self.files:
            try:
                with folder.open(record.name) as stream:
                    found = copy_stream(stream)
            except FileNotFoundError:
                raise damaged(self.location, record.name, "it is missing") from None
            _compare(self.location, record, *found)

    def check_sizes(self) -> None:
        """As `verify`, but looks at sizes only, in one listing."""
        sizes = open_folder(self.location).sizes("")
        for record in self.files:
            if record.name not in sizes:
                raise damaged(self.location, record.name, "it is missing")
            if sizes[record.name] != record.num_bytes:
                raise _wrong_size(self.location, record, sizes[record.name])

    def _local_root(self) -> Path:
        here = open_folder(self.location).local_path()
        # Named by content: an artifact that was made again has a directory of its own.
        return here or _cache() / f"{self.stage}-{self.digest[:SHORT]}"

    def _local_file(self, record: FileRecord, *, verify: bool) -> Path:
        path = self._local_root() / record.name
        remote = open_folder(self.location).local_path() is None
        if remote and not (path.is_file() and path.stat().st_size == record.num_bytes):
            self._fetch(record, path)
        elif verify:
            try:
                with path.open("rb") as stream:
                    found = copy_stream(stream)
            except FileNotFoundError:
                raise damaged(self.location, record.name, "it is missing") from None
            _compare(str(self._local_root()), record, *found)
        return path

    def _fetch(self, record: FileRecord, path: Path) -> None:
        temporary = Path(temporary_name(str(path)))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open_folder(self.location).open(record.name) as reader, temporary.open("xb") as writer:
                found = copy_stream(reader, writer)
            _compare(self.location, record, *found)
            temporary.replace(path)
        except FileNotFoundError:
            raise damaged(self.location, record.name, "it is missing") from None
        finally:
            temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Store:
    """A folder of artifacts, local or remote."""

    location: str
    """Absolute path, or URL."""
    folder: Folder = field(repr=False, compare=False)

    @classmethod
    def open(cls, location: str) -> Store:
        """Open the store at a path or fsspec URL; made if it is missing, and tried by writing to it.

        Raises UserError if it is no directory, cannot be written to or has no space left, or if its
        protocol is unknown.
        """
        if not location or "\0" in location:
            raise UserError(f"{location!r} names no store: pass a folder or an fsspec URL as --store")
        folder = open_folder(location)
        try:
            _probe(folder)
        # Each remote backend raises errors of its own for a wrong address or missing credentials.
        except Exception as error:
            explanation = explain(error, folder.location)
            if explanation is None:
                explanation = f"the store {location} cannot be written ({error!r}): check it or pass another"
            raise UserError(explanation) from error
        return cls(folder.location, folder)

    def artifact(self, stage: str, identity: str) -> Artifact | None:
        """The committed output of `stage`; None if there is none, or if files are missing or short."""
        try:
            return self.committed(stage, identity)
        except DamagedArtifactError:
            return None

    def committed(self, stage: str, identity: str) -> Artifact | None:
        """As `artifact`, but raises DamagedArtifactError for one with missing or short files."""
        where = artifact_name(stage, identity)
        success = self.folder.read(f"{where}/{SUCCESS}")
        if success is None:
            return None
        artifact = self._parse(stage, identity, self.folder.read(f"{where}/{MANIFEST}"), success)
        artifact.check_sizes()
        return artifact

    def lease(self, key: str, *, timeout: float = 0.0) -> Lease:
        """To be entered with `with`; waits up to `timeout` seconds, then raises LeaseHeldError."""
        return Lease(self.folder, key, timeout=timeout)

    def _parse(self, stage: str, identity: str, manifest: bytes | None, success: bytes) -> Artifact:
        location = f"{self.location}/{artifact_name(stage, identity)}"
        if manifest is None:
            raise damaged(location, MANIFEST, "it is missing")
        digest = hashlib.sha256(manifest).hexdigest()
        if digest.encode() != success:
            raise damaged(location, MANIFEST, f"its sha256 is not the one in {SUCCESS}")
        content = json.loads(manifest)
        files = tuple(FileRecord(**entry) for entry in content["files"])
        for record in files:
            check_name(record.name)
        return Artifact(
            stage=stage,
            identity=identity,
            location=location,
            meta=content["meta"],
            inputs=content["inputs"],
            files=files,
            seconds=content["seconds"],
            digest=digest,
        )


def _probe(folder: Folder) -> None:
    """Write a file and remove it. Raises whatever the storage raises."""
    here = folder.local_path()
    if here is not None and here.exists() and not here.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(here))
    name = f".probe-{uuid.uuid4().hex[:8]}"
    folder.create(name, bytes(_PROBE_BYTES))
    folder.remove(name)


def artifact_name(stage: str, identity: str) -> str:
    """Where an artifact stands in its store."""
    for part in (stage, identity):
        if not _NAME.fullmatch(part):
            raise ValueError(f"{part!r} cannot name a stage or an identity")
    return f"{stage}/{identity}"


def damaged(location: str, name: str, what: str) -> DamagedArtifactError:
    """The error for file `name` of the artifact at `location`."""
    error = DamagedArtifactError(
        f"{location}/{name} is damaged ({what}): remove {location} and rerun, which makes it again"
    )
    error.location, error.name = location, name
    return error


def _compare(location: str, record: FileRecord, num_bytes: int, sha256: str) -> None:
    if num_bytes != record.num_bytes:
        raise _wrong_size(location, record, num_bytes)
    if sha256 != record.sha256:
        raise damaged(location, record.name, "its content is not what was written")


def _wrong_size(location: str, record: FileRecord, found: int) -> DamagedArtifactError:
    return damaged(location, record.name, f"it has {found:,} of {record.num_bytes:,} bytes")


def _cache() -> Path:
    """Copies of remote files; may be removed at any time."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dflash-align" / "artifacts"
