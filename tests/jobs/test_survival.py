"""kill -9 of actors, drivers and Ray itself at seeded moments; a disk that fills up mid-shard."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.survival import NUM_ACTORS, VICTIMS, Home, killed_once, make_home, start, undisturbed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, dict[str, str]]:
    home = make_home(tmp_path_factory.mktemp("survival") / "home")
    return home, undisturbed(home)


@pytest.mark.parametrize("moment", range(2))
@pytest.mark.parametrize("victim", VICTIMS)
def test_what_is_killed_ends_in_the_same_bytes_and_redoes_only_what_was_in_flight(
    original: tuple[Home, dict[str, str]], victim: str, moment: int
) -> None:
    home, whole = original
    outcome = killed_once(home, whole, victim, random.Random(f"test {victim} {moment}"))
    assert outcome["identical"]
    assert outcome["redone"] <= NUM_ACTORS
    assert outcome["processes_killed"] >= 1
    # An actor's death is made up for within the run; the others end it, unless they come at its very end.
    assert victim != "actor" or outcome["reruns"] == 0


@pytest.fixture
def small_disk(original: tuple[Home, dict[str, str]]) -> Iterator[Path]:
    """A store on a filesystem that holds the samples (a page a file) and a part of the features."""
    path = original[0].store
    path.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small filesystem cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_disk_that_fills_up_mid_shard_is_said_and_the_run_goes_on_after_it(
    original: tuple[Home, dict[str, str]], small_disk: Path
) -> None:
    home, whole = original
    (home.folder / "log").write_text("")
    assert start(home).wait(300) == 2
    last = (home.folder / "log").read_text().strip().splitlines()[-1]
    assert last.startswith(f"error: the store {small_disk} is full")
    assert last.endswith("free space there or pass another --store, and rerun")
    before = home.shards()
    assert any(name.startswith("features-") for name in before)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert start(home).wait(300) == 0, (home.folder / "log").read_text()
    assert home.digests() == whole
    after = home.shards()
    assert sum(after[name] != made for name, made in before.items()) <= NUM_ACTORS
