"""The job that clears a store, on what a real realignment left."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from tests.jobs.conftest import Home, last_json

DAY = 86_400


def test_a_serving_drafters_lineage_stays_and_without_it_only_notes_do(
    aligned: tuple[Home, dict[str, Any]], tmp_path: Path
) -> None:
    home, result = aligned
    store = Path(shutil.copytree(home.folder / "dflash-store", tmp_path / "store"))
    for path in store.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 20 * DAY,) * 2)
    arguments = ["--store", str(store), "--older-than", "14d", "--json"]
    shown = home.run("prune.py", arguments)
    assert shown.returncode == 0, shown.stderr
    mine = {(s["name"].split()[0], s["identity"]) for s in result["stages"]}
    kept = {(e["stage"], e["identity"]) for e in last_json(shown.stdout)["entries"] if not e["removed"]}
    assert mine <= kept

    shutil.copy(home.folder / "dflash-mlflow.db", tmp_path / "other.db")
    from mlflow import MlflowClient

    client, name = MlflowClient(f"sqlite:///{tmp_path / 'other.db'}"), result["model"]["name"]
    for alias in client.get_registered_model(name).aliases:
        client.delete_registered_model_alias(name, alias)
    others = [
        *("--tracking-uri", f"sqlite:///{tmp_path / 'other.db'}"),
        *("--ignore-registries", f"sqlite:///{home.folder / 'dflash-mlflow.db'}"),
    ]
    done = home.run("prune.py", [*arguments, *others, "--delete"])
    assert done.returncode == 0, done.stderr
    assert {path.parents[1].name for path in store.glob("*/*/_SUCCESS")} == {"settled", "budget", "gate"}
    missing = home.run("prune.py", [*arguments, "--tracking-uri", "sqlite:///nowhere.db"])
    assert (missing.returncode, missing.stdout) == (2, "")
