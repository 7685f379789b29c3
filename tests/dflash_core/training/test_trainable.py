"""What each mode trains and leaves alone, and that every way of training resumes exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_core.errors import UserError
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.models.drafter import Drafter, load_drafter, new_drafter, save_drafter
from dflash_core.models.drafter_config import DrafterConfig
from dflash_core.models.target import Target
from dflash_core.training.schedules import Schedule
from dflash_core.training.trainable import MODES, merge, prepare, trainable
from dflash_core.training.trainer import Trainer
from tests.dflash_core.small_models import (
    feature_set,
    greedy_samples,
    train_options,
)


@pytest.fixture(scope="module")
def rows(target: Target, config: DrafterConfig, tmp_path_factory: pytest.TempPathFactory) -> FeatureSet:
    samples = greedy_samples(target, count=48, new_tokens=16)
    return feature_set(target, config, samples, tmp_path_factory.mktemp("f") / "f.arrow")


def _trainer(target: Target, config: DrafterConfig, rows: FeatureSet, **changes: Any) -> Trainer:
    drafter = new_drafter(config, start=None, seed=0)
    options = train_options(config, steps=changes.pop("steps", 10), **changes)
    return Trainer(drafter, target.embedding_weight, target.head_weight, rows, options)


def _moved(before: Drafter, after: Drafter) -> set[str]:
    old, new = before.state_dict(), after.state_dict()
    return {name for name in old if not torch.equal(old[name], new[name])}


def test_each_mode_moves_what_it_says_and_nothing_else(
    target: Target, config: DrafterConfig, rows: FeatureSet
) -> None:
    moved = {}
    for mode in MODES:
        trainer = _trainer(target, config, rows, mode=mode, lora_rank=2)
        before = new_drafter(config, start=None, seed=0)
        trainer.run(lambda _report: None)
        moved[mode] = _moved(before, trainer.finish())
    names = set(before.state_dict())
    assert moved["full"] == names
    assert moved["lora"] == {n for n in names if before.state_dict()[n].dim() == 2}
    assert moved["private"] == {n for n in names if n == "fc.weight" or "norm" in n}


def test_a_low_rank_update_begins_as_nothing_and_stays_of_its_rank(config: DrafterConfig) -> None:
    plain, untouched, drafter = (new_drafter(config, start=None, seed=0) for _ in range(3))
    for one in (untouched, drafter):
        prepare(one, "lora", lora_rank=3, seed=0)
    assert _moved(plain, merge(untouched)) == set()
    for parameter in trainable(drafter):
        parameter.data.add_(torch.randn_like(parameter))
    merged = merge(drafter)
    change = torch.linalg.svdvals((merged.fc.weight - plain.fc.weight).detach())
    assert change[2] > 0.1 and change[3:].max() < 1e-4
    assert set(merged.state_dict()) == set(plain.state_dict())


def test_what_lora_trained_is_saved_in_the_published_layout(
    target: Target, config: DrafterConfig, rows: FeatureSet, tmp_path: Path
) -> None:
    trainer = _trainer(target, config, rows, mode="lora")
    trainer.run(lambda _report: None)
    trainer.measure()
    finished = trainer.finish()
    save_drafter(finished, tmp_path)
    assert _moved(finished, load_drafter(tmp_path)) == set()


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "muon": {"optimizer": "muon"},
    "lora": {"mode": "lora"},
    "chain": {"anchors": "chain", "chain_epochs": 2},
    "early": {"patience": 1, "learning_rate": 0.0},
    "micro": {"micro_tokens": 50},
}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_killed_training_ends_in_the_same_weights(
    way: str, target: Target, config: DrafterConfig, rows: FeatureSet
) -> None:
    def train(trainer: Trainer, until: int) -> None:
        while not trainer.done and trainer.step_index < until:
            trainer.step()
            if trainer.step_index % 4 == 0:
                trainer.measure()

    whole = _trainer(target, config, rows, steps=14, **WAYS[way])
    train(whole, 100)
    first = _trainer(target, config, rows, steps=14, **WAYS[way])
    train(first, 6)
    second = _trainer(target, config, rows, steps=14, **WAYS[way])
    second.load(copy.deepcopy(first.state()))
    train(second, 100)
    assert second.step_index == whole.step_index
    assert _moved(whole.finish(), second.finish()) == set()


def test_a_step_in_parts_is_the_step_as_a_whole(
    target: Target, config: DrafterConfig, rows: FeatureSet
) -> None:
    whole = _trainer(target, config, rows)
    parts = _trainer(target, config, rows, micro_tokens=30)
    for _ in range(3):
        assert parts.step().loss == pytest.approx(whole.step().loss, rel=1e-4)


def test_the_best_measurement_is_what_is_kept(
    target: Target, config: DrafterConfig, rows: FeatureSet
) -> None:
    trainer = _trainer(target, config, rows, steps=30)
    trainer.run(lambda _report: None)
    best = trainer.measure()
    assert best is not None and trainer.best_tau == best.tau
    good = copy.deepcopy(trainer.drafter)
    with torch.no_grad():
        trainer.drafter.norm.weight.neg_()  # worse than nothing
    worse = trainer.measure()
    assert worse is not None and worse.tau < best.tau == trainer.best_tau
    assert _moved(good, trainer.finish()) == set()


def test_training_ends_when_it_stands_still(target: Target, config: DrafterConfig, rows: FeatureSet) -> None:
    trainer = _trainer(target, config, rows, steps=100, patience=2, learning_rate=0.0)
    for expected in (False, False, True):
        trainer.step()
        trainer.measure()
        assert trainer.done is expected
    wsd = Schedule("wsd", 100, warmup_fraction=0.0, decay_fraction=0.05)
    trainer = _trainer(target, config, rows, schedule=wsd, patience=1, learning_rate=0.0)
    for _ in range(2):
        trainer.step()
        trainer.measure()
    trainer.run(lambda _report: None)
    assert trainer.step_index == 2 + 5


def test_a_step_that_is_not_finite_is_left_out_and_many_are_refused(
    target: Target, config: DrafterConfig, rows: FeatureSet
) -> None:
    trainer = _trainer(target, config, rows)
    trainer.step()
    before = copy.deepcopy(trainer.drafter)
    head = trainer.head
    trainer.head = torch.full_like(head, float("nan"))
    report = trainer.step()
    assert report.skipped == 1 and _moved(before, trainer.drafter) == set()
    trainer.head = head
    assert trainer.step().skipped == 0 and _moved(before, trainer.drafter)
    trainer.head = torch.full_like(head, float("nan"))
    with pytest.raises(UserError, match="5 steps in a row, up to step 7"):
        trainer.run(lambda _report: None)
