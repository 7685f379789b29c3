"""The main job from end to end, as a user runs it: bootstrap, no-op, certification, kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file, save_file

from dflash_core.models.drafter import load_drafter
from dflash_core.toy.build import build_toy_target
from tests.jobs.conftest import ROOT, Home, last_json

STAGES = ["prompts", "inspect", "generate", "extract", "train", "evaluate candidate", "gate"]


def _client(home: Home) -> MlflowClient:
    return MlflowClient(f"sqlite:///{home.folder / 'dflash-mlflow.db'}")


def test_bootstrap_prints_the_contracted_json(aligned: tuple[Home, dict[str, Any]]) -> None:
    home, result = aligned
    assert result["outcome"] == "promoted"
    assert result["target"]["path"] == str(home.target.resolve()) or result["target"]["path"] == "target"
    assert len(result["target"]["fingerprint"]) == 64
    assert result["tau"]["champion"] is None and result["tau"]["candidate"] > 1.05
    assert result["model"]["version"] == 1
    assert [s["name"] for s in result["stages"]] == STAGES
    assert all(set(s) == {"name", "identity", "seconds", "cached"} for s in result["stages"])
    assert not any(s["cached"] for s in result["stages"])
    assert Path(result["report"]).is_file()


def test_the_registry_tells_the_lineage(aligned: tuple[Home, dict[str, Any]]) -> None:
    home, result = aligned
    client, name = _client(home), result["model"]["name"]
    version = client.get_model_version_by_alias(name, "champion")
    target = result["target"]["fingerprint"]
    assert version.version == client.get_model_version_by_alias(name, f"target-{target[:12]}").version
    by_name = {s["name"]: s["identity"] for s in result["stages"]}
    assert version.tags["dflash.corpus_fingerprint"] == by_name["generate"]
    assert version.tags["dflash.features_fingerprint"] == by_name["extract"]
    assert version.tags["dflash.target_fingerprint"] == target
    assert float(version.tags["dflash.tau"]) == result["tau"]["candidate"]
    assert float(version.tags["dflash.tau_low"]) <= result["tau"]["candidate"]
    assert version.tags["dflash.gate"] == "pass"
    run = client.get_run(version.run_id)
    assert run.data.metrics["tau.candidate"] == pytest.approx(result["tau"]["candidate"])
    artifacts = {f.path for f in client.list_artifacts(version.run_id, "report")}
    assert artifacts == {"report/report.json", "report/report.html"}
    curve = client.get_metric_history(version.run_id, "acceptance.candidate")
    assert [m.step for m in sorted(curve, key=lambda m: m.step)] == list(range(1, 8))
    losses = sorted(client.get_metric_history(version.run_id, "train.loss"), key=lambda m: m.step)
    assert [m.step for m in losses] == [10, 20, 30, 40]
    assert losses[-1].value < losses[0].value


def test_what_is_downloaded_loads_here_and_in_the_reference_package(
    aligned: tuple[Home, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = pytest.importorskip("dflash.model")
    home, result = aligned
    monkeypatch.chdir(home.folder)
    mlflow.set_tracking_uri(f"sqlite:///{home.folder / 'dflash-mlflow.db'}")
    source = f"models:/{result['model']['name']}@champion"
    folder = Path(mlflow.artifacts.download_artifacts(source, dst_path=str(tmp_path / "drafter")))
    ours = load_drafter(folder)
    theirs = reference.DFlashDraftModel.from_pretrained(folder)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])


def test_a_rerun_does_nothing_and_starts_no_ray(aligned: tuple[Home, dict[str, Any]]) -> None:
    home, result = aligned
    # A broken Ray: whoever imports it fails.
    (home.folder / "sabotage" / "ray").mkdir(parents=True, exist_ok=True)
    (home.folder / "sabotage" / "ray" / "__init__.py").write_text("raise RuntimeError('Ray was started')\n")
    env = {**os.environ, "PYTHONPATH": f"{home.folder / 'sabotage'}{os.pathsep}{ROOT}"}
    again = home.run("realign.py", home.arguments("target", "--json"), env=env)
    assert again.returncode == 0, again.stderr
    second = last_json(again.stdout)
    assert second["already_done"] is True
    assert (second["outcome"], second["model"], second["report"]) == (
        "promoted",
        result["model"],
        result["report"],
    )
    assert all(s["cached"] for s in second["stages"])
    assert len(_client(home).search_model_versions(f"name = '{result['model']['name']}'")) == 1


def test_a_moved_and_resharded_copy_is_the_same_target(aligned: tuple[Home, dict[str, Any]]) -> None:
    home, result = aligned
    shutil.copytree(home.target, home.folder / "elsewhere", dirs_exist_ok=True)
    again = home.run("realign.py", home.arguments("elsewhere", "--json"))
    assert last_json(again.stdout)["already_done"] is True
    assert last_json(again.stdout)["target"]["fingerprint"] == result["target"]["fingerprint"]


def test_dry_run_tells_the_plan_and_touches_nothing(make_home: Callable[[str], Home]) -> None:
    home = make_home("dry")
    done = home.run("realign.py", home.arguments("target", "--dry-run", "--json"))
    assert done.returncode == 0, done.stderr
    plan = last_json(done.stdout)
    assert [s["name"] for s in plan["stages"]] == STAGES
    assert not any(s["cached"] for s in plan["stages"])
    assert plan["tokens"] == 24 * 24
    assert plan["feature_bytes"] > 0
    assert not (home.folder / "dflash-mlflow.db").exists()
    assert not (home.folder / "dflash-store").exists()


def test_a_target_that_hardly_moved_is_certified_without_training(
    aligned: tuple[Home, dict[str, Any]],
) -> None:
    home, first = aligned
    nudged = home.folder / "nudged"
    shutil.copytree(home.target, nudged, dirs_exist_ok=True)
    weights = load_file(nudged / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * (1 + 1e-6)
    (nudged / "model.safetensors").unlink()
    save_file(weights, nudged / "model.safetensors", metadata={"format": "pt"})
    # Eight prompts leave a wide interval; compared with itself on them the champion has lost nothing.
    done = home.run("realign.py", home.arguments("nudged", "--json"))
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    assert result["outcome"] == "certified"
    assert result["tau"]["candidate"] is None and result["tau"]["champion"] > 1.05
    assert result["model"]["version"] == 1
    assert [s["name"] for s in result["stages"]] == ["prompts", "inspect", "evaluate champion", "gate"]
    version = _client(home).get_model_version(first["model"]["name"], "1")
    aliases = {f"target-{r['target']['fingerprint'][:12]}" for r in (first, result)}
    assert aliases <= set(version.aliases)


def test_a_candidate_below_the_threshold_is_rejected_and_leaves_no_version(
    aligned: tuple[Home, dict[str, Any]], make_home: Callable[[str], Home]
) -> None:
    home, _ = aligned
    # Another store would train again; the registry is another one, so this is a bootstrap.
    registry = ("--tracking-uri", f"sqlite:///{home.folder / 'strict.db'}")
    strict = ("--gate.min-tau", "7.5")
    arguments = home.arguments("target", "--json", *registry)
    at = arguments.index("--gate.min-tau")
    arguments[at : at + 2] = strict
    done = home.run("realign.py", arguments)
    assert done.returncode == 3, done.stderr
    result = last_json(done.stdout)
    assert (result["outcome"], result["model"]["version"]) == ("rejected", None)
    # Everything up to the measurement was found in the store.
    assert [s["name"] for s in result["stages"] if not s["cached"]] == ["gate"]
    client = MlflowClient(registry[1])
    assert client.search_model_versions() == []
    again = home.run("realign.py", arguments)
    assert again.returncode == 3
    assert last_json(again.stdout)["already_done"] is True
    assert len(client.search_runs([e.experiment_id for e in client.search_experiments()])) == 1


def test_killed_at_any_stage_a_rerun_continues_to_the_same_drafter(
    aligned: tuple[Home, dict[str, Any]], make_home: Callable[[str], Home]
) -> None:
    """kill -9 once something of generate, extract, train and evaluate is on disk."""
    _, undisturbed = aligned
    home = make_home("killed")
    moments = ("generate/*/rows/*", "extract/*.partial", "train/*/ray_train/*", "evaluate/*/rows/*")
    for pattern in moments:
        _kill_once_there(home, pattern)
    done = home.run("realign.py", home.arguments("target", "--json"))
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    assert result["model"]["version"] == 1
    assert result["tau"] == undisturbed["tau"]
    mine, theirs = (_drafter_digest(h, r) for h, r in ((home, result), aligned))
    assert mine == theirs


def test_of_two_at_once_one_works_and_the_other_leaves(make_home: Callable[[str], Home]) -> None:
    home = make_home("contended")
    arguments = home.arguments("target", "--json")
    first = subprocess.Popen(
        home.command("realign.py", arguments),
        cwd=home.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not list((home.folder / "dflash-store").glob("generate/*.partial")):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    second = home.run("realign.py", arguments)
    assert second.returncode == 5, second.stderr
    assert second.stderr.strip().splitlines()[-1].startswith("error: ")
    out, _ = first.communicate(timeout=200)
    assert first.returncode == 0
    assert last_json(out)["outcome"] == "promoted"


def _kill_once_there(home: Home, pattern: str) -> None:
    """Start the job, and kill its whole process group as soon as the store holds `pattern`."""
    process = subprocess.Popen(
        home.command("realign.py", home.arguments("target", "--json")),
        cwd=home.folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while not any((home.folder / "dflash-store").glob(pattern)):
        if process.poll() is not None:
            break
        assert time.monotonic() < deadline, f"{pattern} never appeared"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _drafter_digest(home: Home, result: dict[str, Any]) -> dict[str, str]:
    identity = next(s["identity"] for s in result["stages"] if s["name"] == "train")
    manifest = home.folder / "dflash-store" / "train" / identity / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    return {f["name"]: f["sha256"] for f in files if f["name"].startswith("drafter/")}


def test_a_target_that_is_replaced_meanwhile_is_noticed(make_home: Callable[[str], Home]) -> None:
    home = make_home("replaced")
    process = subprocess.Popen(
        home.command("realign.py", home.arguments("target", "--json")),
        cwd=home.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "generate: started" in line:
            break
    weights = load_file(home.target / "model.safetensors")
    (home.target / "model.safetensors").unlink()  # the file is shared with other tests' homes
    save_file(weights, home.target / "model.safetensors", metadata={"format": "pt"})
    out, err = process.communicate(timeout=280)
    assert (process.returncode, out) == (2, ""), err
    assert "model.safetensors changed while this run was at work" in err.strip().splitlines()[-1]
    assert not (home.folder / "dflash-mlflow.db").exists()
    # The same bytes again: the same target, and what was made of it in doubt was not kept.
    assert not list((home.folder / "dflash-store").glob("generate/*/_SUCCESS"))


def test_a_changed_byte_in_the_store_is_never_believed(aligned: tuple[Home, dict[str, Any]]) -> None:
    home, result = aligned
    identity = next(s["identity"] for s in result["stages"] if s["name"] == "evaluate candidate")
    file = home.folder / "dflash-store" / "evaluate" / identity / "acceptance.json"
    honest = file.read_text()
    file.write_text(honest.replace('"accepted": [0', '"accepted": [7', 1))
    try:
        done = home.run("realign.py", home.arguments("target", "--model-name", "tampered"))
    finally:
        file.write_text(honest)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "acceptance.json is damaged" in done.stderr


def test_an_undecided_gate_is_held_and_moves_nothing(aligned: tuple[Home, dict[str, Any]]) -> None:
    """A threshold at the very τ that was measured: the interval lies on both sides of it."""
    home, first = aligned
    threshold = ("--gate.min-tau", str(first["tau"]["candidate"]))
    arguments = home.arguments("target", "--json", "--model-name", "undecided", *threshold)
    done = home.run("realign.py", arguments)
    assert done.returncode == 4, done.stderr
    result = last_json(done.stdout)
    assert (result["outcome"], result["model"]["name"]) == ("held", "undecided")
    # Another model's drafter is made of the same: nothing but the decision is new.
    assert [s["name"] for s in result["stages"] if not s["cached"]] == ["gate"]
    report = json.loads(Path(result["report"]).with_name("report.json").read_text())
    assert report["model"]["name"] == "undecided"
    model = _client(home).get_registered_model("undecided")
    assert set(model.aliases) == {"challenger"}


def _meta(home: Home, result: dict[str, Any], stage: str) -> dict[str, Any]:
    """What a stage of `result` said of its output."""
    identity = next(s["identity"] for s in result["stages"] if s["name"] == stage)
    manifest = json.loads((home.folder / "dflash-store" / stage / identity / "manifest.json").read_text())
    meta: dict[str, Any] = manifest["meta"]
    return meta


@pytest.mark.slow
def test_a_changed_target_is_realigned_from_the_champion(
    aligned: tuple[Home, dict[str, Any]],
) -> None:
    home, _ = aligned
    changed = home.folder / "changed"
    build_toy_target(changed, base=home.target, style="changed", steps=60, threads=1)
    done = home.run("realign.py", home.arguments(changed, "--json", "--select.fraction", "0.5"))
    assert done.returncode in (0, 3, 4), done.stderr
    result = last_json(done.stdout)
    assert result["outcome"] in ("promoted", "held", "rejected")
    names = [s["name"] for s in result["stages"]]
    assert names == ["prompts", "inspect", "evaluate champion", "generate", "select", *STAGES[3:]]
    assert result["tau"]["champion"] is not None and result["tau"]["candidate"] is not None
    selected, features = (_meta(home, result, stage) for stage in ("select", "extract"))
    assert features["samples"] == selected["samples"] < selected["considered"]["samples"]
    assert selected["mean_score"] > selected["mean_score_of_all"]
