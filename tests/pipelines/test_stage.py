"""run_stage under kills, full and read-only disks, damage, and competition."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import ExitCode, LeaseHeldError, UserError
from dflash_core.store.artifacts import DamagedArtifactError, FileRecord, Store, Workspace
from pipelines.stage import EventKind, StageEvent, run_stage, stage_identity

CHILD = Path(__file__).with_name("stage_child.py")
REPOSITORY = Path(__file__).parents[2]


def _load_child() -> Any:
    spec = importlib.util.spec_from_file_location("stage_child", CHILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


child = _load_child()


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(CHILD), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )


@pytest.fixture
def server() -> Iterator[Callable[..., int]]:
    """Runs the child's stage in a process of its own and returns its exit status."""
    process = start()
    assert process.stdin is not None and process.stdout is not None

    def run(**command: Any) -> int:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(
            json.dumps({k: v if isinstance(v, int) else str(v) for k, v in command.items()}) + "\n"
        )
        process.stdin.flush()
        return int(process.stdout.readline())

    yield run
    process.communicate(timeout=60)


@pytest.fixture
def memory_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of runs would wait for the disk at every fsync."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="dflash-test-") as name:
        yield Path(name)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of one megabyte."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small filesystem cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(path)], check=True)


def contents(top: Path) -> dict[str, bytes]:
    """Every file beneath `top`; the manifest without its times."""
    found = {str(p.relative_to(top)): p.read_bytes() for p in top.rglob("*") if p.is_file()}
    for name in [n for n in found if Path(n).name == "manifest.json"]:
        manifest = json.loads(found[name])
        del manifest["seconds"], manifest["finished"]
        found[name] = json.dumps(manifest).encode()
    # It holds the manifest's sha256, times and all.
    return {name: b"" if Path(name).name == "_SUCCESS" else data for name, data in found.items()}


def write_one(data: bytes = b"x") -> Callable[[Workspace], dict[str, Any]]:
    def body(workspace: Workspace) -> dict[str, Any]:
        with workspace.scratch() as scratch:
            (scratch / "file").write_bytes(data)
            workspace.put("out/one.bin", scratch / "file")
        return {"bytes": len(data)}

    return body


def refuse(workspace: Workspace) -> dict[str, Any]:
    raise AssertionError("this stage should have been found")


@pytest.mark.parametrize("resumable", [True, False])
def test_a_kill_before_any_file_operation_leaves_nothing_wrong(
    memory_disk: Path, server: Callable[..., int], resumable: bool
) -> None:
    """Every operation that the stage does on the store is tried as the moment of a kill -9."""
    (memory_disk / "source.bin").write_bytes(child.BLOCK[::-1])
    child.run(str(memory_disk / "whole"), str(memory_disk / "made"), resumable=resumable)
    whole = contents(memory_disk / "whole")
    identity = stage_identity("train", {"seed": 1}, 1)
    number, committed_after_kill = 0, 0
    while True:
        # Starting from nothing each time is the simpler of the two: a third of its moments will do.
        number += 1 if resumable else 3
        place = memory_disk / f"run-{number}"
        place.mkdir()
        (place / "source.bin").symlink_to(memory_disk / "source.bin")
        store, made = place / "store", place / "made"
        status = server(store=store, made=made, kill_before=number, resumable=resumable)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kept = whole_files(store / "train" / f"{identity}.partial") if resumable else set()
        committed = Store.open(str(store)).artifact("train", identity) is not None
        committed_after_kill += committed

        result = child.run(str(store), str(made), resumable=resumable)

        assert result.cached is committed
        result.artifact.verify()
        found = contents(store)
        # A kill after the commit can leave a dead lease and records, one at the start the store's probe.
        harmless = {
            n for n in found if "/." in f"/{n}" or (committed and n.startswith(("leases/", "used/")))
        } - set(whole)
        assert {n: d for n, d in found.items() if n not in harmless} == whole
        times = Counter(made.read_text().split())
        assert all(times[name] == 1 for name in kept if name != "twice.json")
        assert max(times.values()) <= 2
        shutil.rmtree(place)
    assert number > 50, "the stage does more than this on its store"
    assert committed_after_kill > 0, "the moments after the commit belong to it"


def whole_files(partial: Path) -> set[str]:
    """Files in a killed run's workspace that have a record, which must tell the truth."""
    records = [json.loads(p.read_text()) for p in (partial / ".records").rglob("*.json")]
    for record in records:
        assert hashlib.sha256((partial / record["name"]).read_bytes()).hexdigest() == record["sha256"]
    return {record["name"] for record in records}


def test_a_lease_lost_during_the_commit_is_no_commit(tmp_path: Path, server: Callable[..., int]) -> None:
    (tmp_path / "source.bin").write_bytes(child.BLOCK[::-1])
    store, made = tmp_path / "store", tmp_path / "made"
    assert server(store=store, made=made, kill_before=0, resumable=True) == ExitCode.LEASE_HELD
    assert Store.open(str(store)).artifact("train", stage_identity("train", {"seed": 1}, 1)) is None
    assert not child.run(str(store), str(made), resumable=True).cached


def test_a_run_killed_again_and_again_gets_there(memory_disk: Path, server: Callable[..., int]) -> None:
    (memory_disk / "source.bin").write_bytes(child.BLOCK[::-1])
    store, made = memory_disk / "store", memory_disk / "made"
    kills = 0
    while server(store=store, made=made, kill_before=40 + 5 * kills, resumable=True):
        kills += 1
        assert kills < 30
    assert kills >= 2
    assert child.run(str(store), str(made), resumable=True).cached
    assert max(Counter(made.read_text().split()).values()) <= kills


def test_a_kill_in_the_middle_of_a_copy_leaves_no_file(tmp_path: Path) -> None:
    store, fifo = tmp_path / "store", tmp_path / "fifo"
    os.mkfifo(fifo)
    process = start(str(store), str(fifo))
    with fifo.open("wb", buffering=0) as pipe:
        # A pipe holds 64 KiB: when this returns, most of it has been copied.
        pipe.write(bytes(1 << 20))
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
    partial = next((store / "train").iterdir())
    assert partial.suffix == ".partial"
    assert not (partial / "slow.bin").exists()
    half_written = [p for p in partial.iterdir() if p.name.endswith(".tmp")]
    assert len(half_written) == 1
    process.communicate()

    def body(workspace: Workspace) -> dict[str, Any]:
        assert sorted(p.name for p in partial.iterdir()) == [".inputs", ".owner"]
        (tmp_path / "slow.bin").write_bytes(b"all of it")
        workspace.put("slow.bin", tmp_path / "slow.bin")
        return {}

    opened = Store.open(str(store))
    artifact = run_stage(opened, "train", {"slow": True}, body, code_version=1, resumable=True).artifact
    assert [record.num_bytes for record in artifact.files] == [len(b"all of it")]
    assert sorted(p.name for p in Path(artifact.location).iterdir()) == [
        "_SUCCESS",
        "manifest.json",
        "slow.bin",
    ]


def test_of_two_runs_of_one_stage_one_is_told_to_wait(tmp_path: Path) -> None:
    store, fifo = str(tmp_path / "store"), tmp_path / "fifo"
    os.mkfifo(fifo)
    first = start(store, str(fifo))
    with fifo.open("wb") as pipe:  # opens when the first run, inside its stage, reads from it
        second = start(store, str(fifo))
        _, message = second.communicate(timeout=60)
        assert second.returncode == ExitCode.LEASE_HELD
        assert f"process {first.pid} on {os.uname().nodename}" in message
        assert "Traceback" not in message
        pipe.write(b"done")
    assert first.communicate(timeout=60) == ("", "")
    assert first.returncode == 0
    found = run_stage(Store.open(store), "train", {"slow": True}, refuse, code_version=1)
    assert found.cached


def test_cached_by_identity(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    events: list[StageEvent] = []
    first = run_stage(store, "train", {"seed": 1}, write_one(), code_version=1, on_event=events.append)
    again = run_stage(store, "train", {"seed": 1}, refuse, code_version=1, on_event=events.append)
    assert (first.cached, again.cached) == (False, True)
    assert again.artifact == first.artifact
    assert first.artifact.meta == {"bytes": 1}
    assert first.artifact.inputs == {"seed": 1}
    assert [e.kind for e in events] == [EventKind.STARTED, EventKind.FINISHED, EventKind.CACHED]
    identities = {
        first.identity,
        run_stage(store, "train", {"seed": 2}, write_one(), code_version=1).identity,
        run_stage(store, "train", {"seed": 1}, write_one(), code_version=2).identity,
        run_stage(store, "extract", {"seed": 1}, write_one(), code_version=1).identity,
    }
    assert len(identities) == 4


def test_inputs_without_identity_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    with pytest.raises(TypeError):
        run_stage(store, "train", {"path": object()}, refuse, code_version=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("resumable", [True, False])
def test_bad_input_leaves_nothing_behind(tmp_path: Path, resumable: bool) -> None:
    store = Store.open(str(tmp_path))

    def body(workspace: Workspace) -> dict[str, Any]:
        with workspace.scratch() as scratch:
            (scratch / "half").write_bytes(b"half")
            raise UserError("the prompts are empty; pass others")

    with pytest.raises(UserError, match="prompts are empty"):
        run_stage(store, "inspect", {}, body, code_version=1, resumable=resumable)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [tmp_path / "leases" / ".lock"]
    assert list((tmp_path / "inspect").iterdir()) == []


def test_after_an_error_a_resumable_stage_keeps_what_was_put_and_no_other_does(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    kept: list[FileRecord | None] = []

    def body(workspace: Workspace) -> dict[str, Any]:
        kept.append(workspace.record("out/one.bin"))
        if kept[-1] is None:
            write_one()(workspace)
            raise RuntimeError("our own fault")
        return {}

    for resumable in (False, True):
        with pytest.raises(RuntimeError):
            run_stage(store, "train", {}, body, code_version=1, resumable=resumable)
        assert any((tmp_path / "train").iterdir()) is resumable
    events: list[StageEvent] = []
    result = run_stage(store, "train", {}, body, code_version=1, resumable=True, on_event=events.append)
    assert [record is None for record in kept] == [True, True, False]
    assert result.artifact.files == (kept[-1],)
    assert events[0].kind == EventKind.RESUMED


def test_of_a_workspace_only_files_that_are_as_recorded_are_kept(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    seen: list[tuple[bool, bool]] = []

    def body(workspace: Workspace) -> dict[str, Any]:
        first = not seen
        seen.append((workspace.record("out/one.bin") is not None, workspace.record("b.json") is not None))
        write_one()(workspace)
        workspace.put_json("b.json", {})
        if first:
            Path(workspace.location, "out/one.bin").write_bytes(b"")
            raise RuntimeError
        return {}

    with pytest.raises(RuntimeError):
        run_stage(store, "train", {}, body, code_version=1, resumable=True)
    run_stage(store, "train", {}, body, code_version=1, resumable=True).artifact.verify()
    assert seen == [(False, False), (False, True)]


@pytest.mark.parametrize("location", ["{tmp}", "memory://damage/{tmp}"])
@pytest.mark.parametrize("damage", ["short", "missing"])
def test_a_damaged_artifact_is_set_aside_and_made_again(tmp_path: Path, location: str, damage: str) -> None:
    store = Store.open(location.format(tmp=tmp_path))
    first = run_stage(store, "train", {}, write_one(b"abc"), code_version=1)
    place = f"train/{first.identity}"
    for number in (1, 2):
        if damage == "short":
            store.folder.write(f"{place}/out/one.bin", b"ab")
        else:
            store.folder.remove(f"{place}/out/one.bin")
        assert store.artifact("train", first.identity) is None
        events: list[StageEvent] = []
        again = run_stage(store, "train", {}, write_one(b"abc"), code_version=1, on_event=events.append)
        assert not again.cached
        again.artifact.verify()
        assert events[0].kind == EventKind.DAMAGED
        assert "out/one.bin is damaged" in events[0].message
        assert f"{first.identity}.damaged-{number}" in events[0].message
        aside = store.folder.sizes(f"{place}.damaged-{number}")
        assert "manifest.json" in aside and "_SUCCESS" not in aside


@pytest.mark.parametrize("location", ["{tmp}", "memory://lost/{tmp}"])
def test_a_run_that_lost_its_lease_commits_nothing_and_clears_nothing(tmp_path: Path, location: str) -> None:
    """What a run sees that was suspended until another machine took its work over."""
    store = Store.open(location.format(tmp=tmp_path))
    identity = stage_identity("train", {}, 1)

    def lose_lease() -> None:
        store.folder.remove(f"leases/train-{identity}.json")

    def body(workspace: Workspace) -> dict[str, Any]:
        lose_lease()
        successor = run_stage(store, "train", {}, write_one(b"theirs"), code_version=1)
        assert not successor.cached
        return {"ours": True}

    with pytest.raises(LeaseHeldError, match="taken over"):
        run_stage(store, "train", {}, body, code_version=1)
    found = run_stage(store, "train", {}, refuse, code_version=1)
    found.artifact.verify()
    assert found.artifact.meta == {"bytes": 6}
    assert {name.partition("/")[2] for name in store.folder.sizes("train")} == {
        "_SUCCESS",
        "manifest.json",
        "out/one.bin",
    }


def test_a_run_that_lost_its_lease_cannot_write_into_its_successors_workspace(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    identity = stage_identity("train", {}, 1)
    late: list[Workspace] = []

    def successor(workspace: Workspace) -> dict[str, Any]:
        write_one(b"theirs")(workspace)
        with pytest.raises(LeaseHeldError, match="taken over by another run"):
            late[0].put("out/one.bin", Path(__file__))
        return {}

    def body(workspace: Workspace) -> dict[str, Any]:
        late.append(workspace)
        (tmp_path / "leases" / f"train-{identity}.json").unlink()
        run_stage(store, "train", {}, successor, code_version=1)
        return {}

    with pytest.raises(LeaseHeldError):
        run_stage(store, "train", {}, body, code_version=1)
    found = run_stage(store, "train", {}, refuse, code_version=1)
    assert found.artifact.local("out/one.bin").read_bytes() == b"theirs"


def test_a_full_disk_is_explained_and_the_rerun_goes_on(small_disk: Path) -> None:
    store = Store.open(str(small_disk / "store"))
    made: list[str] = []

    def body(workspace: Workspace) -> dict[str, Any]:
        for name in ("a.bin", "b.bin"):
            if workspace.record(name) is None:
                made.append(name)
                with workspace.scratch() as scratch:
                    (scratch / name).write_bytes(os.urandom(600_000))
                    workspace.put(name, scratch / name)
        return {}

    with pytest.raises(UserError) as refused:
        run_stage(store, "extract", {}, body, code_version=1, resumable=True)
    assert str(refused.value).startswith(f"the store {small_disk}/store is full (0.")
    assert str(refused.value).endswith("free space there or pass another --store, and rerun")
    assert store.artifact("extract", stage_identity("extract", {}, 1)) is None

    remount(small_disk, "size=4m")
    result = run_stage(store, "extract", {}, body, code_version=1, resumable=True)
    result.artifact.verify()
    assert made == ["a.bin", "b.bin", "b.bin"]


def test_a_full_disk_leaves_nothing_of_a_stage_that_cannot_resume(small_disk: Path) -> None:
    store = Store.open(str(small_disk))
    with pytest.raises(UserError, match="is full"):
        run_stage(store, "train", {}, write_one(bytes(2_000_000)), code_version=1)
    assert [p for p in small_disk.rglob("*") if p.is_file()] == [small_disk / "leases" / ".lock"]


def test_a_full_disk_is_recognized_in_a_librarys_own_error(small_disk: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save_file = pytest.importorskip("safetensors.numpy").save_file
    store = Store.open(str(small_disk))

    def body(workspace: Workspace) -> dict[str, Any]:
        with workspace.scratch() as scratch:
            save_file({"weight": numpy.zeros(1_000_000, numpy.float32)}, scratch / "model.safetensors")
        return {}

    with pytest.raises(UserError, match="is full"):
        run_stage(store, "train", {}, body, code_version=1)


def test_a_store_that_turns_read_only_is_explained_and_the_rerun_goes_on(small_disk: Path) -> None:
    store = Store.open(str(small_disk))

    def body(workspace: Workspace) -> dict[str, Any]:
        write_one(b"first")(workspace)
        remount(small_disk, "ro")
        workspace.put_json("second.json", {})
        raise AssertionError("written to a read-only disk")

    with pytest.raises(UserError, match=r"is read-only: make it writable"):
        run_stage(store, "train", {}, body, code_version=1, resumable=True)
    with pytest.raises(UserError, match="is read-only"):
        Store.open(str(small_disk))
    remount(small_disk, "rw")
    # The lease's file could not be removed, yet this very process may take it again.
    again = run_stage(store, "train", {}, write_one(b"again"), code_version=1, resumable=True)
    again.artifact.verify()


def test_an_error_from_another_process_is_explained_by_its_cause(tmp_path: Path) -> None:
    class RemoteError(Exception):
        """As Ray raises it: the worker's error is an attribute."""

        def __init__(self, cause: BaseException) -> None:
            super().__init__("the task failed")
            self.cause = cause

    store = Store.open(str(tmp_path))

    def body(workspace: Workspace) -> dict[str, Any]:
        raise RemoteError(PermissionError(13, "Permission denied", f"{workspace.location}/a"))

    with pytest.raises(UserError, match="may not be written by this user"):
        run_stage(store, "train", {}, body, code_version=1)

    def unreadable_input(workspace: Workspace) -> dict[str, Any]:
        raise PermissionError(13, "Permission denied", "/somewhere/else")

    with pytest.raises(PermissionError):
        run_stage(store, "train", {}, unreadable_input, code_version=1)


def test_a_file_lost_before_the_commit_is_no_commit(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))

    def body(workspace: Workspace) -> dict[str, Any]:
        write_one()(workspace)
        Path(workspace.location, "out/one.bin").unlink()
        return {}

    with pytest.raises(FileNotFoundError, match=r"out/one\.bin"):
        run_stage(store, "train", {}, body, code_version=1)
    assert store.artifact("train", stage_identity("train", {}, 1)) is None


def test_damage_that_keeps_the_size_is_found_by_verify(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    artifact = run_stage(store, "train", {}, write_one(b"abc"), code_version=1).artifact
    artifact.local("out/one.bin").write_bytes(b"abd")
    for check in (artifact.verify, artifact.local_dir):
        with pytest.raises(DamagedArtifactError, match=r"out/one\.bin is damaged .*rerun"):
            check()
    assert artifact.local_dir(verify=False) == Path(artifact.location)
