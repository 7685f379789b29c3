"""Is the target still the one that was opened? A run takes hours, and its files may be replaced meanwhile."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from dflash_core.errors import UserError


@dataclass(frozen=True)
class TargetGuard:
    """What a target's files looked like; plain data, so that workers can look again."""

    directory: Path
    host: str
    """Where it was looked at: elsewhere a copy has times and inodes of its own, and goes unchecked."""
    files: dict[str, tuple[int, int, int]]
    """Name -> (size, mtime in ns, inode). Not the ctime, which a mere hard link changes."""

    @classmethod
    def of(cls, directory: Path) -> TargetGuard:
        """Take it before the files are read; a directory that is not there holds none."""
        names = [p.name for p in directory.iterdir() if p.is_file()] if directory.is_dir() else []
        files = {name: found for name in names if (found := _look(directory / name))}
        return cls(directory, platform.node(), files)

    def check(self) -> None:
        """Raise UserError if a file was written, replaced or removed since. Costs one `stat` a file."""
        if platform.node() != self.host:
            return
        for name, seen in self.files.items():
            if _look(self.directory / name) != seen:
                raise UserError(
                    f"{self.directory / name} changed while this run was at work; nothing was registered: "
                    "wait until its writer has finished and run again"
                )


def _look(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
