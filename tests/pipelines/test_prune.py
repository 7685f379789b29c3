"""Pruning a real store against a real registry: what stays, what goes, and what a kill leaves."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_core import tags as t
from dflash_core.errors import UserError
from dflash_core.fingerprint import file_sha256
from dflash_core.models.drafter_identity import drafter_fingerprint
from dflash_core.store.artifacts import Store, Workspace
from dflash_core.store.store_contents import USED
from pipelines.prune import Pruning, age_text, prune
from pipelines.prune_config import PruneConfig
from pipelines.registry import Registry
from pipelines.stage import StageResult, run_stage

DAY = 86_400.0
TARGET = "a" * 64


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return Registry(f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow.db", "family")


def make(store: Store, stage: str, inputs: dict[str, Any], **files: bytes) -> StageResult:
    def body(workspace: Workspace) -> dict[str, Any]:
        with workspace.scratch() as scratch:
            for name, data in files.items():
                (scratch / name).write_bytes(data)
                workspace.put(name.replace("__", "/").replace("_", "."), scratch / name)
        return {}

    return run_stage(store, stage, inputs, body, code_version=1, resumable=True)


def lineage(store: Store, seed: int) -> dict[str, StageResult]:
    """generate -> extract -> train, as a realignment makes them."""
    generated = make(store, "generate", {"seed": seed}, samples_jsonl=b"{}\n")
    extracted = make(store, "extract", {"samples": generated.identity}, features_arrow=bytes(10_000))
    weights = f"{seed}".encode()
    files = {"drafter__config_json": b"{}", "drafter__model_safetensors": weights}
    trained = make(store, "train", {"features": extracted.identity}, **files)
    return {"generate": generated, "extract": extracted, "train": trained}


def serve(registry: Registry, made: dict[str, StageResult]) -> None:
    """Register the drafter and let it serve."""
    directory = made["train"].artifact.local_dir() / "drafter"
    names = ("config.json", "model.safetensors")
    fingerprint = drafter_fingerprint({name: file_sha256(directory / name) for name in names})
    run = {t.JOB_IDENTITY: fingerprint, t.OUTCOME: "promoted"}
    run_id = registry.log_run(tags=run, params={}, metrics={}, step_metrics={})
    tags = {t.DRAFTER_FINGERPRINT: fingerprint, t.BLOCK_SIZE: "8"}
    version = registry.register(directory, run_id, tags).version
    entry: t.ServeEntry = {
        "target_fingerprint": TARGET,
        "target_path": "/models/a",
        "tau": 2.0,
        "tau_low": 1.9,
        "tau_high": 2.1,
        "outcome": "promoted",
        "job_identity": fingerprint,
        "run_id": run_id,
        "at": t.utc_now(),
    }
    registry.promote(version, entry)


def grow_old(store: Store, days: float) -> None:
    """Move every time in the store back."""
    for path in Path(store.location).rglob("*"):
        if path.is_file() and "leases" not in path.parts:
            os.utime(path, (time.time() - days * DAY,) * 2)


def clear(store: Store, registry: Registry, *, delete: bool = True, **more: str) -> Pruning:
    config = PruneConfig(
        store=store.location, tracking_uri=registry.tracking_uri, **(more or {"older_than": "14d"})
    )
    return prune(config, delete=delete)


def gone(pruning: Pruning) -> set[str]:
    return {d.entry.name for d in pruning.decisions if d.removed}


def names(made: dict[str, StageResult]) -> set[str]:
    return {f"{result.name}/{result.identity}" for result in made.values()}


def test_what_serves_keeps_its_origins_and_the_rest_goes_only_with_delete(
    tmp_path: Path, registry: Registry
) -> None:
    store = Store.open(str(tmp_path / "store"))
    serving, other = lineage(store, 1), lineage(store, 2)
    serve(registry, serving)
    settled = make(store, "settled", {"registry": registry.tracking_uri}, result_json=b"{}")
    grow_old(store, 20)
    shown = clear(store, registry, delete=False)
    assert gone(shown) == names(other)
    assert all(store.artifact(r.name, r.identity) for r in (*serving.values(), *other.values()))
    why = {d.entry.name: d.why for d in shown.decisions}
    assert "version 1 of family (champion)" in why[f"extract/{serving['extract'].identity}"]
    assert "--delete" in shown.text() and f"{other['extract'].identity[:12]}" in shown.text()

    done = clear(store, registry)
    assert gone(done) == names(other)
    assert done.to_json()["removed_bytes"] > 10_000
    assert {p.name for p in (tmp_path / "store" / "extract").iterdir()} == {serving["extract"].identity}
    assert all(store.artifact(r.name, r.identity) for r in (*serving.values(), settled))
    assert gone(clear(store, registry)) == set()


def test_an_artifact_that_a_run_found_lately_is_not_old(tmp_path: Path, registry: Registry) -> None:
    store = Store.open(str(tmp_path / "store"))
    made = lineage(store, 3)
    grow_old(store, 20)
    make(store, "generate", {"seed": 3})
    assert gone(clear(store, registry, delete=False)) == names(made) - {
        f"generate/{made['generate'].identity}"
    }
    assert [p.name for p in (tmp_path / "store" / USED).iterdir()] == [
        f"generate-{made['generate'].identity}"
    ]


def test_a_run_at_work_keeps_its_workspace_and_what_it_reads(tmp_path: Path, registry: Registry) -> None:
    store = Store.open(str(tmp_path / "store"))
    generated = make(store, "generate", {"seed": 4}, samples_jsonl=b"{}\n")
    seen: list[set[str]] = []

    def body(workspace: Workspace) -> dict[str, Any]:
        workspace.put_json("rows/a.json", {})
        grow_old(store, 20)
        seen.append(gone(clear(store, registry)))
        if len(seen) == 1:
            raise RuntimeError("killed")
        return {}

    for _ in range(2):
        make(store, "extract", {"samples": generated.identity, "orphan": len(seen)}, a=b"")
        try:
            run_stage(store, "extract", {"samples": generated.identity}, body, code_version=1, resumable=True)
        except RuntimeError:
            # Nobody is at it any more: an abandoned workspace, which goes by its age.
            grow_old(store, 10)
            assert gone(clear(store, registry)) == set()
    assert [{name.partition("/")[0] for name in names_} for names_ in seen] == [{"extract"}, {"extract"}]
    assert store.artifact("generate", generated.identity) is not None
    assert not any(".partial" in name for names_ in seen for name in names_)


def test_an_abandoned_workspace_and_what_was_set_aside_go(tmp_path: Path, registry: Registry) -> None:
    store = Store.open(str(tmp_path / "store"))

    def fail(workspace: Workspace) -> dict[str, Any]:
        workspace.put_json("rows/a.json", {})
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_stage(store, "extract", {"seed": 5}, fail, code_version=1, resumable=True)
    first = make(store, "extract", {"seed": 6}, a=b"abc")
    Path(first.artifact.location, "a").unlink()
    make(store, "extract", {"seed": 6}, a=b"abc")
    grow_old(store, 20)
    assert {name.partition(".")[2] for name in gone(clear(store, registry))} == {"partial", "damaged-1", ""}
    assert list((tmp_path / "store" / "extract").iterdir()) == []


@pytest.mark.parametrize("location", ["{tmp}/store", "memory://prune/{tmp}"])
def test_a_prune_killed_midway_leaves_no_artifact_and_goes_on(
    tmp_path: Path, registry: Registry, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(location.format(tmp=tmp_path))
    made = make(store, "extract", {"seed": 7}, a=b"abc", b=b"def")
    monkeypatch.setattr("pipelines.prune.clock", lambda _folder: time.time() + 20 * DAY)

    def killed(_name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(store.folder), "remove_tree", lambda self, name: killed(name))
        with pytest.raises(KeyboardInterrupt):
            clear(store, registry)
    assert store.artifact("extract", made.identity) is None
    assert set(store.folder.sizes("extract"))
    again = clear(store, registry)
    assert [d.why for d in again.decisions] == ["half removed already"]
    assert store.folder.sizes("extract") == {}
    assert not make(store, "extract", {"seed": 7}, a=b"abc", b=b"def").cached


def test_a_half_removed_output_is_made_again(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    made = make(store, "extract", {"seed": 8}, a=b"abc")
    Path(made.artifact.location, "_SUCCESS").unlink()
    again = make(store, "extract", {"seed": 8}, a=b"abc")
    assert not again.cached
    again.artifact.verify()


def test_a_registry_that_cannot_be_asked_stops_it(tmp_path: Path, registry: Registry) -> None:
    store = Store.open(str(tmp_path / "store"))
    lineage(store, 9)
    make(store, "settled", {"registry": f"sqlite:///{tmp_path}/gone.db"}, result_json=b"{}")
    grow_old(store, 20)
    with pytest.raises(UserError, match=r"gone\.db is not there.*--ignore-registries"):
        clear(store, registry)
    server = PruneConfig(store=store.location, tracking_uri="http://127.0.0.1:9", older_than="1d")
    with pytest.raises(UserError):
        prune(server, delete=True)
    assert len(list((tmp_path / "store").glob("*/*/_SUCCESS"))) == 4
    ignoring = PruneConfig(
        store=store.location,
        tracking_uri=registry.tracking_uri,
        older_than="1d",
        ignore_registries=(f"sqlite:///{tmp_path}/gone.db",),
    )
    assert len(gone(prune(ignoring, delete=False))) == 3


def test_runs_that_only_share_the_gate_prompts_with_what_serves_go(
    tmp_path: Path, registry: Registry
) -> None:
    store = Store.open(str(tmp_path / "store"))

    def drawn(train: str) -> dict[str, StageResult]:
        meta = {"train_fingerprint": train, "gate_fingerprint": "9" * 64, "source": "some words"}
        chosen = run_stage(store, "prompts", {"train": train}, lambda _workspace: meta, code_version=1)
        inputs = {"target": TARGET, "train": train, "gate": "9" * 64}
        return {"prompts": chosen, "inspect": make(store, "inspect", inputs, gate_jsonl=b"")}

    mine, failed = drawn("1" * 64), drawn("2" * 64)
    mine["generate"] = make(store, "generate", {"target": TARGET, "prompts": "1" * 64}, a=b"")
    mine["train"] = make(
        store,
        "train",
        {"samples": mine["generate"].identity},
        drafter__config_json=b"{}",
        drafter__model_safetensors=b"gate",
    )
    serve(registry, mine)
    grow_old(store, 20)
    shown = clear(store, registry, delete=False)
    assert gone(shown) == names(failed)
    assert all(d.removed or "of family" in d.why for d in shown.decisions)


def test_bytes_that_cannot_be_reached_are_said(tmp_path: Path, registry: Registry) -> None:
    store = Store.open(str(tmp_path / "store"))
    made = lineage(store, 10)
    serve(registry, made)
    grow_old(store, 20)
    make(store, "extract", {"seed": 11}, a=bytes(5_000))
    shown = clear(store, registry, delete=False, keep_bytes="4kB")
    assert shown.over_bytes == shown.kept_bytes - 4_000 == shown.to_json()["over_bytes"]
    over, registries = shown.text().splitlines()[-2:]
    assert re.fullmatch(
        r"still \S+ kB over --keep-bytes, since \S+ kB is needed and \S+ kB was used within the hour", over
    )
    assert registries == f"registry: {registry.tracking_uri}"
    assert registry.tracking_uri not in "".join(d.why for d in shown.decisions)
    assert "over" not in clear(store, registry, delete=False, keep_bytes="1GB").text()


def test_two_registries_are_numbered(tmp_path: Path, registry: Registry) -> None:
    store = Store.open(str(tmp_path / "store"))
    made = lineage(store, 12)
    other = Registry(f"sqlite:///{tmp_path}/other.db", "family")
    serve(other, made)
    make(store, "settled", {"registry": other.tracking_uri}, result_json=b"{}")
    shown = clear(store, registry, delete=False)
    number = shown.registries.index(other.tracking_uri) + 1
    assert f"holds version 1 of family (champion) [{number}]" in {d.why for d in shown.decisions}
    assert f"registry [{number}]: {other.tracking_uri}" in shown.text()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.9, "59s"), (60, "1m"), (5_400, "1.5h"), (20 * DAY, "20d")],
)
def test_ages_for_people(seconds: float, text: str) -> None:
    assert age_text(seconds) == text


def test_it_wants_to_be_told_what_may_go_and_where(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--older-than 14d"):
        prune(PruneConfig(store=str(tmp_path)), delete=True)
    with pytest.raises(UserError, match="there is no store at"):
        prune(PruneConfig(store=str(tmp_path / "none"), older_than="1d"), delete=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "photos" / "2026").mkdir(parents=True)
    (tmp_path / "photos" / "2026" / "a.jpg").write_bytes(b"a")
    (tmp_path / "empty").mkdir()
    for location in (tmp_path / "photos", tmp_path / "empty", f"memory://no/{tmp_path.name}"):
        with pytest.raises(UserError, match=rf"{location} is no store: .*; pass --store"):
            prune(PruneConfig(store=str(location), older_than="1d"), delete=True)
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["a.jpg"]
    assert (PruneConfig(keep_bytes="1.5TB").bytes, PruneConfig(older_than="36h").seconds) == (
        15 * 10**11,
        129_600,
    )
