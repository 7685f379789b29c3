"""Stage `select` in a real store, through real actors."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import read_samples, write_samples
from dflash_core.store.artifacts import Store, Workspace
from dflash_core.toy.build import build_tiny_target
from dflash_core.types import Sample
from pipelines import select
from pipelines.cluster import ClusterInfo
from pipelines.config import RealignConfig, SelectSection
from pipelines.context import Context
from pipelines.placement import Machine, place
from pipelines.plan import Plan
from pipelines.stage import StageResult


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "target").path


def _context(folder: Path, target: Path, **options: Any) -> Context:
    config = RealignConfig(target=str(target), select=SelectSection(**options))
    checkpoint = open_checkpoint(target)
    placement = place(config, Machine(num_cpus=2, num_gpus=0), checkpoint.num_parameters)
    guard = TargetGuard.of(target)
    store = Store.open(str(folder))
    return Context(config, store, checkpoint, guard, placement, lambda: None, lambda _event: None)


def _samples(shard: int) -> list[Sample]:
    domains = ("math", "code")
    return [Sample(f"{shard}/{i}", domains[i % 2], tuple(range(10 + i)), ((4, 10 + i),)) for i in range(12)]


def _generated(context: Context) -> StageResult:
    def body(workspace: Workspace) -> dict[str, Any]:
        for shard in range(3):
            with workspace.scratch() as scratch:
                write_samples(scratch / "s", _samples(shard))
                workspace.put(f"samples-{shard:05d}.jsonl", scratch / "s")
        return {"samples": 36, "tokens": 1}

    return Plan("generate", {}, 1).run(context, body)


def test_a_random_half_is_kept_and_every_sample_says_why(
    tmp_path: Path, target: Path, local_ray: ClusterInfo
) -> None:
    context = _context(tmp_path, target, fraction=0.5, by="random")
    generated, selected = select.run(context, _generated(context), None)
    assert select.run(context, generated, None)[1].cached
    kept: list[Sample] = []
    told: list[dict[str, Any]] = []
    for shard in range(3):
        name = f"samples-{shard:05d}.jsonl"
        chosen = list(read_samples(selected.artifact.local(name)))
        assert chosen == [s for s in _samples(shard) if s.id in {c.id for c in chosen}]
        kept += chosen
        told += json.loads(selected.artifact.local(f"selection-{shard:05d}.json").read_text())
    meta = selected.artifact.meta
    assert [row["id"] for row in told if row["kept"]] == [s.id for s in kept]
    tokens, everything = sum(len(s.input_ids) for s in kept), sum(row["tokens"] for row in told)
    assert (meta["samples"], meta["tokens"]) == (len(kept), tokens)
    assert meta["considered"] == {"samples": 36, "tokens": everything}
    assert everything / 2 - 22 < tokens <= everything / 2
    assert sum(meta["domains"].values()) == len(kept)
    assert min(r["score"] for r in told if r["kept"]) == meta["lowest_score"]
    assert max(r["score"] for r in told if not r["kept"]) <= meta["lowest_score"]


def test_nothing_is_selected_unasked_or_without_a_drafter_to_ask(
    tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = _context(tmp_path, target)
    generated = _generated(context)
    assert select.run(context, generated, None) == (generated,)
    assert "select" not in capsys.readouterr().err
    context = _context(tmp_path, target, fraction=0.5)
    assert select.run(context, generated, None) == (generated,)
    assert "all answers are kept, since there is no drafter yet" in capsys.readouterr().err


def test_selections_differ_by_all_that_they_depend_on(tmp_path: Path, target: Path) -> None:
    champion: Any = SimpleNamespace(fingerprint="a" * 64)
    identities = [
        select.plan(_context(tmp_path, target, **options), samples, champion).identity
        for samples in ("x", "y")
        for options in (
            {"fraction": 0.5},
            {"fraction": 0.4},
            {"fraction": 0.5, "by": "random"},
            {"fraction": 0.5, "anchors_per_answer": 8},
        )
    ]
    assert len(set(identities)) == 8
