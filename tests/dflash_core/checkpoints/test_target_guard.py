"""A target is watched by what a `stat` shows: any writing is noticed, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.errors import UserError


def overwrite(file: Path) -> None:
    file.write_bytes(b"other")
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))  # clocks of file systems are coarse


def replace_file(file: Path) -> None:
    new = file.with_name("new")
    new.write_bytes(file.read_bytes())
    os.utime(new, ns=(1, file.stat().st_mtime_ns))
    new.replace(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    path = tmp_path / "target" / "model.safetensors"
    path.write_bytes(b"bytes")
    return path


@pytest.mark.parametrize("change", [overwrite, replace_file, Path.unlink])
def test_a_change_is_noticed(file: Path, change: Callable[[Path], None]) -> None:
    guard = TargetGuard.of(file.parent)
    guard.check()
    change(file)
    with pytest.raises(UserError, match=r"model\.safetensors changed while"):
        guard.check()
    replace(guard, host="another machine").check()


def test_reading_linking_and_neighbors_are_no_change(file: Path, tmp_path: Path) -> None:
    guard = TargetGuard.of(file.parent)
    file.read_bytes()
    (tmp_path / "backup").hardlink_to(file)
    file.chmod(0o444)
    (file.parent / "notes.txt").write_text("new")
    guard.check()


def test_a_missing_directory_is_for_others_to_report(tmp_path: Path) -> None:
    TargetGuard.of(tmp_path / "nowhere").check()
