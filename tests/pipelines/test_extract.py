"""Stage `extract` in a real store, through real actors: what is kept, in how many bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import write_samples
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.models.target import load_target
from dflash_core.store.artifacts import Store, Workspace
from dflash_core.toy.build import build_tiny_target
from dflash_core.types import Sample
from pipelines import extract
from pipelines.cluster import ClusterInfo
from pipelines.config import ExtractSection, RealignConfig
from pipelines.context import Context
from pipelines.placement import Machine, place
from pipelines.plan import Plan
from pipelines.stage import StageResult

LAYERS = (0,)
LENGTHS = (10, 700, 20, 33)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "target", steps=2).path


def _context(folder: Path, target: Path, **options: Any) -> Context:
    config = RealignConfig(target=str(target), extract=ExtractSection(**options))
    checkpoint = open_checkpoint(target)
    placement = place(config, Machine(num_cpus=2, num_gpus=0), checkpoint.num_parameters)
    store = Store.open(str(folder))
    guard = TargetGuard.of(target)
    return Context(config, store, checkpoint, guard, placement, lambda: None, lambda _event: None)


def _generated(context: Context) -> StageResult:
    """Two shards of samples; the long one passes in chunks."""

    def body(workspace: Workspace) -> dict[str, Any]:
        for shard in range(2):
            samples = [
                Sample(f"{shard}/{n}", "math", tuple(i % 90 for i in range(n)), ((4, n),)) for n in LENGTHS
            ]
            with workspace.scratch() as scratch:
                write_samples(scratch / "s", samples)
                workspace.put(f"samples-{shard:05d}.jsonl", scratch / "s")
        return {"samples": 2 * len(LENGTHS), "tokens": 1}

    return Plan("generate", {}, 1).run(context, body)


def _extracted(context: Context) -> StageResult:
    generated = _generated(context)
    return extract.run(context, extract.plan(context, generated.identity, LAYERS), generated)


def _rows(result: StageResult) -> FeatureSet:
    meta = result.artifact.meta
    return FeatureSet([result.artifact.local(name) for name in meta["shards"]], meta["shard_samples"])


def test_features_are_the_target_s_own_and_two_runs_leave_the_same_bytes(
    tmp_path: Path, target: Path, local_ray: ClusterInfo
) -> None:
    options = {"shard_tokens": 500, "batch_tokens": 64, "chunk_tokens": 64, "last_hidden": True}
    first, second = (_extracted(_context(tmp_path / name, target, **options)) for name in ("a", "b"))
    assert len(first.artifact.meta["shards"]) == 2
    shards = [[r.sha256 for r in s.artifact.files if r.name.startswith("features-")] for s in (first, second)]
    assert shards[0] == shards[1] and len(shards[0]) == 2
    rows = _rows(first)
    assert sorted(row.id for row in rows) == sorted(f"{s}/{n}" for s in range(2) for n in LENGTHS)
    model = load_target(target).model
    for row in rows:
        with torch.inference_mode():
            states = model(row.input_ids.long()[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[i + 1][0] for i in LAYERS], dim=-1)
        assert (row.features.float() - expected).abs().max() <= expected.abs().max() / 128
        assert row.last_hidden is not None
        assert (row.last_hidden.float() - states[-1][0]).abs().max() <= states[-1].abs().max() / 128


def test_compact_shards_have_half_the_bytes(tmp_path: Path, target: Path, local_ray: ClusterInfo) -> None:
    whole, half = (
        _extracted(_context(tmp_path, target, storage=storage)).artifact for storage in ("bf16", "compact")
    )
    numbers = whole.meta["tokens"] * len(LAYERS) * 64 * 2
    assert numbers <= whole.meta["bytes"] <= 1.15 * numbers  # ids and masks weigh a twentieth at this width
    assert half.meta["bytes"] <= 0.58 * whole.meta["bytes"]


def test_what_is_kept_is_part_of_the_identity_and_batches_are_not(tmp_path: Path, target: Path) -> None:
    def identity(**options: Any) -> str:
        return extract.plan(_context(tmp_path, target, **options), "g", LAYERS).identity

    assert len({identity(), identity(storage="compact"), identity(last_hidden=True)}) == 3
    assert identity() == identity(batch_tokens=64, chunk_tokens=64)
