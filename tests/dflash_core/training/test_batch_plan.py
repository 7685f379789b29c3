"""Which documents a step sees, and the learning rate it takes."""

from __future__ import annotations

import itertools

import pytest

from dflash_core.training.batch_plan import BatchPlan, cut
from dflash_core.training.schedules import Schedule

LENGTHS = [5, 50, 20, 70, 33, 8, 60, 41]


def _plan(documents: list[int] | None = None) -> BatchPlan:
    return BatchPlan(LENGTHS, batch_tokens=80, seed=0, documents=documents)


def test_every_document_is_seen_once_an_epoch_within_the_token_budget() -> None:
    plan = _plan()
    seen: list[int] = []
    step = 0
    while len(seen) < 3 * len(LENGTHS):
        batch = plan.batch(step)
        assert batch and (len(batch) == 1 or sum(LENGTHS[i] for i in batch) <= 80)
        assert plan.epoch(step) == len(seen) // 8
        seen += batch
        step += 1
    epochs = [seen[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    # Asked out of order, as a resumed run does, the plan says the same.
    assert _plan().batch(step - 1) == plan.batch(step - 1)
    assert plan.batch(0) == _plan().batch(0)


def test_what_is_held_out_is_never_drawn() -> None:
    plan = _plan([0, 2, 3, 7])
    assert {i for step in range(20) for i in plan.batch(step)} == {0, 2, 3, 7}


def test_a_step_is_cut_for_memory_without_losing_a_document() -> None:
    runs = cut([3, 0, 1, 2, 7], LENGTHS, 75)
    assert runs == [[3, 0], [1, 2], [7]]
    assert cut([3, 0, 1], LENGTHS, None) == [[3, 0, 1]]
    assert cut([3, 1], LENGTHS, 10) == [[3], [1]]
    assert cut([], LENGTHS, 10) == []


def test_a_cosine_warms_up_and_falls_to_zero() -> None:
    schedule = Schedule("cosine", 100, warmup_fraction=0.1, decay_fraction=0.2)
    rates = [schedule.factor(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[-1] < 0.001
    assert (schedule.last_step(None), schedule.last_step(40)) == (100, 40)


def test_wsd_is_constant_and_decays_at_its_end_or_when_training_has_converged() -> None:
    schedule = Schedule("wsd", 100, warmup_fraction=0.1, decay_fraction=0.2)
    rates = [schedule.factor(step) for step in range(100)]
    assert rates[10:81] == [1.0] * 71
    assert rates[80:] == pytest.approx([1 - i / 20 for i in range(20)])
    assert (schedule.last_step(None), schedule.last_step(40), schedule.last_step(95)) == (100, 60, 100)
    early = [schedule.factor(step, 40) for step in range(10, 60)]
    assert early[:30] == [1.0] * 30
    assert early[30:] == pytest.approx([1 - i / 20 for i in range(20)])
