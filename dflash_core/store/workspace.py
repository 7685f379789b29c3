"""Where a stage writes: files go in one by one, each whole or not at all, and are still known after a kill.

A workspace is plain data and may be sent to other processes and machines. Beside every file that was put
stands a record of its size and sha256 under `.records/`, written last: a file without one does not count.
Whatever else a stage leaves (a trainer's own checkpoints, say) survives a kill too, but is no part of
what is committed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_core.errors import LeaseHeldError, UserError
from dflash_core.store.folder import Folder, is_temporary, open_folder

MANIFEST, SUCCESS = "manifest.json", "_SUCCESS"
RECORDS, OWNER, SCRATCH = ".records", ".owner", ".scratch"
ROWS = "rows"
INPUTS = ".inputs"
"""What an unfinished stage is made of, until its manifest says so."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a stage's output."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Workspace:
    """A stage's output in the making."""

    location: str
    """Local path or URL."""
    token: str
    """The lease that this run works under; a run that lost it can write no more."""

    def put(self, name: str, local_file: Path) -> FileRecord:
        """Bring a file in as `name`, which may have sub-folders; replaces what was there.

        A file from `scratch()` is moved where that is possible, any other is copied. Raises
        LeaseHeldError if another run took this work over, and UserError if the workspace cannot be
        seen from this machine.
        """
        check_name(name)
        folder = self._folder()
        self._check_owner(folder)
        folder.remove(_record_name(name))
        num_bytes, sha256 = folder.put_file(name, local_file, move=self._in_scratch(local_file))
        record = FileRecord(name, num_bytes, sha256)
        # Not made durable by itself: half a record after a power cut is no record.
        folder.write(_record_name(name), json.dumps(asdict(record)).encode(), durable=False)
        return record

    def record(self, name: str) -> FileRecord | None:
        """What is known of a file that was put, by this run or an earlier one that was killed."""
        check_name(name)
        folder = self._folder()
        record = _parse_record(folder.read(_record_name(name)))
        return record if record and folder.size(name) == record.num_bytes else None

    def put_json(self, name: str, value: Any) -> FileRecord:
        """Put `value` as a JSON file."""
        with self.scratch() as scratch:
            file = scratch / "value.json"
            file.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
            return self.put(name, file)

    def get_json(self, name: str) -> Any | None:
        """The value of a JSON file that was put; None if it was not, or if it is no longer what was put."""
        record = self.record(name)
        data = None if record is None else self._folder().read(name)
        return json.loads(data) if record is not None and data is not None and _is(record, data) else None

    def forget(self, name: str) -> None:
        """Take a file that was put as one that was not; it goes when the stage is committed."""
        check_name(name)
        self._folder().remove(_record_name(name))

    def json_files(self, folder_name: str) -> Iterator[tuple[str, Any]]:
        """Name and value of every JSON file that was put into `folder_name`, from one listing.

        Files that are no longer what was put are left out.
        """
        folder = self._folder()
        found = (_parse_record(data) for _, data in folder.read_tree(f"{RECORDS}/{folder_name}"))
        digests = {record.name: record.sha256 for record in found if record}
        for name, data in folder.read_tree(folder_name):
            whole = f"{folder_name}/{name}"
            if digests.get(whole) == hashlib.sha256(data).hexdigest():
                yield whole, json.loads(data)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file that was put, by name, in one listing."""
        found = self._folder().sizes("")
        known = {name[len(RECORDS) + 1 : -len(".json")] for name in found if name.startswith(f"{RECORDS}/")}
        return {name: size for name, size in found.items() if name in known}

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for half-made files, gone afterwards; beside the workspace's files if that is local."""
        folder = self._folder()
        here = folder.local_path()
        if here is None:
            with tempfile.TemporaryDirectory(prefix="dflash-scratch-") as name:
                yield Path(name)
            return
        self._check_owner(folder)
        path = here / SCRATCH / uuid.uuid4().hex
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def forget_changed(self) -> int:
        """Forget every file that is gone or has another size than was put; how many are left."""
        folder = self._folder()
        sizes, kept = folder.sizes(""), 0
        for name, data in folder.read_tree(RECORDS):
            record = _parse_record(data)
            if record is None or sizes.get(record.name) != record.num_bytes:
                folder.remove(f"{RECORDS}/{name}")
            else:
                kept += 1
        return kept

    def records(self) -> list[FileRecord]:
        """All files that were put, by name. Raises FileNotFoundError for one that is gone or changed size."""
        folder = self._folder()
        sizes = folder.sizes("")
        stored = folder.read_tree(RECORDS)
        found = [_parse_record(data) for name, data in stored if not is_temporary(name)]
        records = sorted((record for record in found if record), key=lambda r: r.name)
        for record in records:
            if sizes.get(record.name) != record.num_bytes:
                raise FileNotFoundError(f"{self.location}/{record.name} is not as it was written")
        return records

    def _folder(self) -> Folder:
        return open_folder(self.location)

    def _in_scratch(self, file: Path) -> bool:
        scratch = Path(self.location, SCRATCH)
        # A link is not moved: what it points to may be anybody's.
        return file.is_relative_to(scratch) and not file.is_symlink()

    def _check_owner(self, folder: Folder) -> None:
        owner = folder.read(OWNER)
        if owner is None:
            raise UserError(
                f"{self.location} is no longer there or cannot be seen from {platform.node()}: "
                "keep the store where every machine of the cluster sees it under this name, and rerun"
            )
        if owner.decode() != self.token:
            raise LeaseHeldError(
                f"{self.location} was taken over by another run: its work is left to that run, "
                "whose result a rerun will find"
            )


def row_name(shard: str) -> str:
    """Where the manifest row stands that says that a shard is done."""
    return f"{ROWS}/{shard}.json"


def check_name(name: str) -> None:
    """Raises ValueError unless `name` is a plain relative path that is not reserved for the store itself."""
    parts = PurePosixPath(name).parts
    plain = parts and str(PurePosixPath(*parts)) == name and "\\" not in name and "\0" not in name
    if not plain or name in (MANIFEST, SUCCESS) or any(p.startswith((".", "/")) for p in parts):
        raise ValueError(f"{name!r} cannot name a file of a stage")


def _is(record: FileRecord, data: bytes) -> bool:
    return hashlib.sha256(data).hexdigest() == record.sha256


def _record_name(name: str) -> str:
    return f"{RECORDS}/{name}.json"


def _parse_record(data: bytes | None) -> FileRecord | None:
    if data is None:
        return None
    try:
        return FileRecord(**json.loads(data))
    except (ValueError, TypeError):
        return None
