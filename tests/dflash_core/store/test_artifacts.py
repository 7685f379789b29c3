"""Stores, workspaces and committed artifacts, on local folders and behind URLs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from dflash_core.errors import ExitCode, UserError
from dflash_core.store.artifacts import Artifact, DamagedArtifactError, FileRecord, Store, Workspace
from dflash_core.store.attempt import Attempt
from dflash_core.store.store_contents import contents

LOCATIONS = ["{tmp}/store", "file://{tmp}/my%20store", "memory://artifacts{tmp}", "plain://{tmp}/plain"]
INPUTS = {"seed": 1}


class PlainFileSystem(LocalFileSystem):
    """A filesystem with real directories, reached as any remote one is."""

    protocol = ("plain",)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("plain://"))


fsspec.register_implementation("plain", PlainFileSystem, clobber=True)


@pytest.fixture(params=LOCATIONS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Store.open(request.param.format(tmp=tmp_path))


def make(store: Store, body: Callable[[Workspace], dict[str, Any]], identity: str = "abc") -> Artifact:
    with store.lease(identity) as lease:
        attempt = Attempt(store, lease, "train", identity, resumable=False)
        workspace, _ = attempt.begin({})
        return attempt.commit(workspace, INPUTS, body(workspace), 1.5)


def two_files(workspace: Workspace) -> dict[str, Any]:
    with workspace.scratch() as scratch:
        (scratch / "m").write_bytes(b"weights" * 1000)
        workspace.put("drafter/model.safetensors", scratch / "m")
    workspace.put_json("rows/a.json", {"name": "é", "n": [1, None]})
    return {"tau": 5.25}


def test_round_trip(store: Store) -> None:
    assert store.artifact("train", "abc") is None
    made = make(store, two_files)
    found = store.artifact("train", "abc")
    assert found == made
    assert pickle.loads(pickle.dumps(found)) == made
    assert (made.meta, made.inputs, made.seconds) == ({"tau": 5.25}, INPUTS, 1.5)
    weights = b"weights" * 1000
    assert made.files[0] == FileRecord("drafter/model.safetensors", len(weights), sha256(weights).hexdigest())
    assert [record.name for record in made.files] == ["drafter/model.safetensors", "rows/a.json"]
    made.verify()
    assert made.local("drafter/model.safetensors").read_bytes() == weights
    directory = made.local_dir()
    assert json.loads((directory / "rows/a.json").read_text(encoding="utf-8")) == {
        "name": "é",
        "n": [1, None],
    }
    manifest = json.loads(store.folder.read("train/abc/manifest.json") or b"")
    assert [FileRecord(**entry) for entry in manifest["files"]] == list(made.files)


def test_a_store_survives_pickling_and_reopening(store: Store) -> None:
    made = make(store, two_files)
    assert pickle.loads(pickle.dumps(store)).artifact("train", "abc") == made
    assert Store.open(store.location).artifact("train", "abc") == made


def test_local_artifacts_are_used_in_place_and_remote_ones_are_fetched_once(
    store: Store, tmp_path: Path
) -> None:
    made = make(store, two_files)
    directory = made.local_dir()
    if store.folder.local_path() is not None:
        assert directory == Path(made.location)
        return
    assert directory.is_relative_to(tmp_path / "cache")
    store.folder.remove_tree("train/abc")
    assert made.local_dir() == directory
    assert made.local("rows/a.json").is_file()
    with pytest.raises(DamagedArtifactError, match=r"model\.safetensors is damaged \(it is missing\)"):
        made.verify()


def test_a_remote_file_that_arrives_damaged_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = Store.open(f"memory://arrives{tmp_path}")
    made = make(store, two_files)
    store.folder.write("train/abc/rows/a.json", b"x" * made.files[1].num_bytes)
    for _ in range(2):
        with pytest.raises(DamagedArtifactError, match=r"rows/a\.json is damaged \(its content"):
            made.local("rows/a.json")
    assert not [p for p in tmp_path.rglob("*a.json*") if p.is_file()]


def test_a_damaged_copy_in_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = make(Store.open(f"memory://cached{tmp_path}"), two_files)
    copy = made.local("rows/a.json")
    copy.write_bytes(b"x" * made.files[1].num_bytes)
    with pytest.raises(DamagedArtifactError, match=str(copy)):
        made.local_dir()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("drafter/model.safetensors", None, "it is missing"),
        ("drafter/model.safetensors", b"weights", "it has 7 of 7,000 bytes"),
        ("drafter/model.safetensors", b"Weights" * 1000, "its content is not what was written"),
        ("manifest.json", b"{}", "its sha256 is not the one in _SUCCESS"),
        ("manifest.json", None, "it is missing"),
        ("_SUCCESS", b"", "manifest.json is damaged"),
    ],
)
def test_damage_is_found_and_named(store: Store, name: str, data: bytes | None, words: str) -> None:
    made = make(store, two_files)
    if data is None:
        store.folder.remove(f"train/abc/{name}")
    else:
        store.folder.write(f"train/abc/{name}", data)
    same_size = data is not None and len(data) == 7000
    assert (store.artifact("train", "abc") is None) is not same_size
    with pytest.raises(DamagedArtifactError) as found:
        if not same_size:
            store.committed("train", "abc")
        made.verify()
    assert words in str(found.value)
    assert str(found.value).startswith(f"{made.location}/")
    assert str(found.value).endswith("and rerun, which makes it again")


def test_without_the_marker_there_is_no_artifact(store: Store) -> None:
    make(store, two_files)
    store.folder.remove("train/abc/_SUCCESS")
    assert store.artifact("train", "abc") is None


def workspace_of(store: Store) -> Workspace:
    with store.lease("work") as lease:
        return Attempt(store, lease, "train", "abc", resumable=True).begin({})[0]


def test_a_workspace_can_be_sent_to_another_process(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    workspace = workspace_of(store)
    code = (
        "import pickle, sys; workspace = pickle.load(sys.stdin.buffer); "
        "workspace.put_json('rows/a.json', 7); "
        "assert not {'torch', 'ray', 'mlflow', 'fsspec'} & set(sys.modules)"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(workspace),
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        check=True,
    )
    assert workspace.get_json("rows/a.json") == 7


def test_a_relative_store_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = workspace_of(Store.open("store"))
    monkeypatch.chdir("/")
    workspace.put_json("a.json", 1)
    assert (tmp_path / "store/train/abc.partial/a.json").read_text() == "1\n"


def test_only_files_from_scratch_are_moved(store: Store, tmp_path: Path) -> None:
    workspace = workspace_of(store)
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    workspace.put("copy", mine)
    assert mine.read_text() == "mine"
    with workspace.scratch() as scratch:
        (scratch / "link").symlink_to(mine)
        workspace.put("linked", scratch / "link")
        (scratch / "made").write_text("made")
        workspace.put("moved", scratch / "made")
        assert (scratch / "made").exists() is (store.folder.local_path() is None)
    assert not scratch.exists()
    assert mine.read_text() == "mine"
    place = workspace.location.removeprefix(store.location).lstrip("/")
    found = {name: store.folder.read(f"{place}/{name}") for name in ("copy", "linked", "moved")}
    assert found == {"copy": b"mine", "linked": b"mine", "moved": b"made"}


def test_a_file_counts_only_with_a_record_that_fits(store: Store) -> None:
    workspace = workspace_of(store)
    place = workspace.location.removeprefix(store.location).lstrip("/")
    record = workspace.put_json("a.json", [1, 2])
    assert workspace.record("a.json") == record
    store.folder.write(f"{place}/a.json", b"[1,")
    assert workspace.record("a.json") is None
    assert workspace.get_json("a.json") is None
    assert workspace.put_json("a.json", [3]) == workspace.record("a.json")
    store.folder.write(f"{place}/.records/a.json.json", b'{"name": ')
    assert workspace.record("a.json") is None
    store.folder.write(f"{place}/stranger", b"no record")
    assert workspace.record("stranger") is None


def test_what_was_not_put_is_not_committed(store: Store) -> None:
    def body(workspace: Workspace) -> dict[str, Any]:
        place = workspace.location.removeprefix(store.location).lstrip("/")
        store.folder.write(f"{place}/trainer/deep/state", b"for myself")
        return two_files(workspace)

    make(store, body)
    assert set(store.folder.sizes("train/abc")) == {
        "_SUCCESS",
        "manifest.json",
        "drafter/model.safetensors",
        "rows/a.json",
    }


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../b",
        "/a",
        "a//b",
        "a/",
        ".hidden",
        "a/.b",
        "a\\b",
        "_SUCCESS",
        "manifest.json",
    ],
)
def test_names_that_leave_the_workspace_or_are_taken(tmp_path: Path, name: str) -> None:
    workspace = workspace_of(Store.open(str(tmp_path)))
    with pytest.raises(ValueError, match="cannot name a file"):
        workspace.put(name, Path(__file__))


def test_a_workspace_that_this_machine_cannot_see(tmp_path: Path) -> None:
    workspace = replace(workspace_of(Store.open(str(tmp_path))), location=str(tmp_path / "not-shared"))
    with pytest.raises(UserError, match="every machine of the cluster sees it"):
        workspace.put_json("a.json", 1)
    assert not (tmp_path / "not-shared").exists()


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("", "names no store"),
        ("a\0b", "names no store"),
        ("{file}", "is not a directory"),
        ("{file}/below", "is not a directory"),
        ("file://store", "no absolute path"),
        ("nonsense://bucket", "Protocol not known: nonsense"),
        ("http://127.0.0.1:9/store", "cannot be written"),
        ("/proc/store", "cannot be written"),
        ("{long}", "File name too long"),
    ],
)
def test_a_location_that_is_no_store(tmp_path: Path, location: str, words: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=words) as refused:
        Store.open(location.format(file=tmp_path / "file", long=tmp_path / ("x" * 300)))
    assert refused.value.exit_code == ExitCode.BAD_INPUT
    assert ": " in str(refused.value)


def test_a_folder_of_somebody_elses_is_no_store() -> None:
    """In a process that is not root, whom permissions do not bind."""
    code = (
        "import os, sys; from dflash_core.store.artifacts import Store, UserError\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: Store.open(sys.argv[1])\n"
        "except UserError as error: print(error)"
    )
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o555)
        found = subprocess.run(
            [sys.executable, "-c", code, name],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            check=True,
            capture_output=True,
            text=True,
        )
        assert list(Path(name).iterdir()) == []
    assert found.stdout.startswith(f"the store {name} may not be written by this user: ")
    assert found.stdout.endswith("make it writable or pass another --store, and rerun\n")


def test_opening_leaves_nothing_but_the_folder(tmp_path: Path) -> None:
    Store.open(str(tmp_path / "a/b"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a/b"]


def test_import_is_light() -> None:
    code = (
        "import sys; import pipelines.stage, dflash_core.store.artifacts; "
        "heavy = {'torch', 'ray', 'mlflow', 'fsspec', 'numpy', 'pyarrow'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_note_that_changed_on_disk_is_as_if_it_had_not_been_put(store: Store) -> None:
    with store.lease("k") as lease:
        workspace, _ = Attempt(store, lease, "stage", "a" * 64, resumable=True).begin({})
        for name in ("rows/a.json", "rows/b.json"):
            workspace.put_json(name, {"accepted": 10})
        name = f"stage/{'a' * 64}.partial/rows/a.json"
        if not store.folder.exists(name):  # remote storage cannot rename, so it is made in place
            name = name.replace(".partial", "")
        data = store.folder.read(name)
        assert data is not None
        store.folder.write(name, data.replace(b"10", b"70"))
        assert workspace.get_json("rows/a.json") is None
        assert dict(workspace.json_files("rows")) == {"rows/b.json": {"accepted": 10}}
        store.folder.write(name, bytes(len(data)))  # what a power cut may leave
        assert workspace.get_json("rows/a.json") is None
        assert [name for name, _ in workspace.json_files("rows")] == ["rows/b.json"]


def test_a_damaged_note_does_not_stop_a_look_at_the_store(store: Store) -> None:
    with store.lease("k") as lease:
        Attempt(store, lease, "stage", "a" * 64, resumable=True).begin({})
    for name, content in (("a", b""), ("b", b"garbage"), ("c", b"[1]")):
        store.folder.write(f"generate/{name * 64}.partial/.inputs", content)
        store.folder.write(f"generate/{name * 64}/manifest.json", content)
        store.folder.write(f"generate/{name * 64}/_SUCCESS", b"x")
    found = [entry for entry in contents(store) if entry.stage == "generate"]
    assert len(found) == 6 and not any(entry.inputs for entry in found)
