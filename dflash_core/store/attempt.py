"""One run's attempt at a stage, from an empty or left-over workspace to the committed artifact.

Locally the workspace is `<stage>/<identity>.partial`, renamed to `<stage>/<identity>` when its manifest is
written; the marker `_SUCCESS` follows. Remote storage cannot rename a directory in one step, so there the
files are written where they stay and the marker alone commits. All of it happens under the stage's lease:
a run that lost the lease neither commits nor clears anything away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from dflash_core.errors import LeaseHeldError
from dflash_core.store.artifacts import Artifact, Store, artifact_name
from dflash_core.store.folder import Folder, is_temporary
from dflash_core.store.lease import Lease
from dflash_core.store.workspace import (
    INPUTS,
    MANIFEST,
    OWNER,
    RECORDS,
    SCRATCH,
    SUCCESS,
    Workspace,
    row_name,
)

_RECORDS, _SCRATCH = f"{RECORDS}/", f"{SCRATCH}/"


@dataclass(frozen=True)
class Attempt:
    """A stage being made under a lease that is held."""

    store: Store
    lease: Lease
    stage: str
    identity: str
    resumable: bool

    def begin(self, inputs: dict[str, Any]) -> tuple[Workspace, int]:
        """A workspace, and the number of files in it that an earlier run finished; 0 for a new one.

        inputs: written down, so that nobody clears away what this work reads.
        """
        self._recover()
        workspace = Workspace(f"{self.store.location}/{self._partial}", self.lease.owner.token)
        num_kept = self._salvage(workspace) if self.resumable else None
        if num_kept is None:
            self._folder.remove_tree(self._partial)
        self._folder.write(f"{self._partial}/{INPUTS}", json.dumps(inputs).encode(), durable=False)
        self._folder.write(f"{self._partial}/{OWNER}", workspace.token.encode())
        return workspace, num_kept or 0

    def commit(
        self, workspace: Workspace, inputs: dict[str, Any], meta: dict[str, Any], seconds: float
    ) -> Artifact:
        """Publish what was put. Raises LeaseHeldError, and publishes nothing, if the lease was lost."""
        self.lease.check()
        records = workspace.records()
        names = {OWNER, *(record.name for record in records)}
        self._folder.prune(self._partial, lambda name: name in names or name.startswith(_RECORDS))
        manifest = {
            "stage": self.stage,
            "identity": self.identity,
            "inputs": inputs,
            "meta": meta,
            "files": [asdict(record) for record in records],
            "seconds": seconds,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        data = json.dumps(manifest, ensure_ascii=False, indent=1).encode()
        self._folder.write(f"{self._partial}/{MANIFEST}", data)
        self._folder.sync_tree(self._partial)
        with self.lease.confirmed():
            if self._partial != self._final:
                self._folder.rename(self._partial, self._final)
            self._folder.write(f"{self._final}/{SUCCESS}", hashlib.sha256(data).hexdigest().encode())
        # Committed: what only the making needed may go, and need not.
        with contextlib.suppress(OSError):
            self._folder.remove(f"{self._final}/{OWNER}")
            self._folder.remove_tree(f"{self._final}/{RECORDS}")
        artifact = self.store.committed(self.stage, self.identity)
        assert artifact is not None
        return artifact

    def abandon(self) -> None:
        """After a failure: keep what a rerun can use, remove the rest; raises nothing itself."""
        with contextlib.suppress(OSError, LeaseHeldError), self.lease.confirmed():
            self._folder.remove_tree(f"{self._partial}/{SCRATCH}")
            if not (self.resumable and self._left_over()):
                self._folder.remove_tree(self._partial)

    def set_aside(self) -> str:
        """Rename a damaged artifact out of the way; returns its new location."""
        number = 1
        while self._folder.exists(aside := f"{self._final}.damaged-{number}"):
            number += 1
        # Without the marker it is no artifact, even if a slow move is interrupted.
        self._folder.remove(f"{self._final}/{SUCCESS}")
        self._folder.rename(self._final, aside)
        return f"{self.store.location}/{aside}"

    def reopen(self, name: str) -> None:
        """Make a committed artifact a workspace again that lacks file `name` and the row that vouches for it.

        What is committed anew is what it was, if making that file is deterministic.
        """
        manifest = json.loads(self._folder.read(f"{self._final}/{MANIFEST}") or b"{}")
        self._folder.write(f"{self._final}/{INPUTS}", json.dumps(manifest["inputs"]).encode())
        self._folder.write(f"{self._final}/{OWNER}", self.lease.owner.token.encode())
        self._folder.remove(f"{self._final}/{SUCCESS}")
        if self._partial != self._final:
            self._folder.remove_tree(self._partial)
            self._folder.rename(self._final, self._partial)
        for record in manifest["files"]:
            if record["name"] not in (name, row_name(name)):
                data = json.dumps(record).encode()
                self._folder.write(f"{self._partial}/{RECORDS}/{record['name']}.json", data, durable=False)

    def _recover(self) -> None:
        """A run was killed between the rename and the marker: take the rename back."""
        if self._partial != self._final and self._folder.exists(self._final):
            self._folder.remove_tree(self._partial)
            self._folder.rename(self._final, self._partial)

    def _salvage(self, workspace: Workspace) -> int | None:
        """Clear away what an earlier run left half-done; None if nothing useful is left."""
        if not self._left_over():
            return None
        num_kept = workspace.forget_changed()
        self._folder.prune(self._partial, lambda name: not (name.startswith(_SCRATCH) or is_temporary(name)))
        return num_kept

    def _left_over(self) -> bool:
        """Whether the workspace holds anything that a stage wrote."""
        names = self._folder.sizes(self._partial)
        return any(
            name not in (OWNER, INPUTS, MANIFEST) and not name.startswith((_RECORDS, _SCRATCH))
            for name in names
        )

    @property
    def _folder(self) -> Folder:
        return self.store.folder

    @property
    def _final(self) -> str:
        return artifact_name(self.stage, self.identity)

    @property
    def _partial(self) -> str:
        return f"{self._final}.partial" if self._folder.renames else self._final
