"""Automatic budgets: complete, never against the user, sized to machine and target."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.budget import DEFAULT_MIN_TAU, resolve_budget
from pipelines.config import RealignConfig

TINY, SMALL, LARGE = 1_000_000, 135_000_000, 8_000_000_000


def make(**values: object) -> RealignConfig:
    return RealignConfig.model_validate({"target": "t", **values})


@given(
    num_parameters=st.integers(1_000, 1_000_000_000_000),
    num_gpus=st.integers(0, 64),
    num_cpus=st.integers(1, 512),
    max_positions=st.none() | st.integers(16, 1 << 20),
)
def test_every_machine_gets_a_valid_budget(
    num_parameters: int, num_gpus: int, num_cpus: int, max_positions: int | None
) -> None:
    config = resolve_budget(make(), num_parameters, num_gpus, num_cpus, max_positions=max_positions)
    # model_copy does not validate: a second reading proves that bounds and exclusions hold.
    assert RealignConfig.model_validate(config.model_dump()) == config
    assert (config.train.steps is None) != (config.train.epochs is None)
    for value in (
        config.generate.max_new_tokens,
        config.generate.batch_tokens,
        config.generate.shard_prompts,
        config.extract.shard_tokens,
        config.drafter.num_layers,
        config.drafter.block_size,
        config.train.batch_tokens,
        config.train.anchors_per_sequence,
        config.evaluate.num_prompts,
        config.evaluate.max_new_tokens,
    ):
        assert value is not None
    if max_positions is not None:
        assert 2 * config.generate.max_new_tokens <= max_positions
        assert 2 * config.evaluate.max_new_tokens <= max_positions
    assert config.evaluate.num_prompts >= config.gate.min_prompts


@given(num_parameters=st.integers(1_000, 10**12), num_gpus=st.integers(0, 8))
def test_what_the_user_gave_stays(num_parameters: int, num_gpus: int) -> None:
    config = make(
        generate={"num_prompts": 3, "max_new_tokens": 5, "batch_tokens": 2, "shard_prompts": 4},
        extract={"shard_tokens": 21},
        drafter={"num_layers": 7, "block_size": 4},
        train={"steps": 11, "batch_tokens": 13, "anchors_per_sequence": 17},
        evaluate={"num_prompts": 19, "max_new_tokens": 23},
        gate={"min_tau": 3.0},
    )
    assert resolve_budget(config, num_parameters, num_gpus, 2, max_positions=64) == config


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_epochs_of_the_user_exclude_automatic_steps(num_gpus: int) -> None:
    train = resolve_budget(make(train={"epochs": 2}), SMALL, num_gpus, 2).train
    assert (train.steps, train.epochs) == (None, 2)


def test_gpus_get_the_papers_recipe() -> None:
    config = resolve_budget(make(train={"num_workers": 2}), LARGE, 2, 32, max_positions=40_960)
    assert (config.drafter.num_layers, config.drafter.block_size) == (5, 16)
    assert (config.train.epochs, config.train.anchors_per_sequence) == (6, 512)
    assert config.train.learning_rate == 6e-4
    assert config.train.batch_tokens == 2 * 4 * 3072
    assert config.generate.num_prompts is None


def test_a_gpu_that_must_not_be_used_does_not_count() -> None:
    assert resolve_budget(make(device="cpu"), LARGE, 8, 32) == resolve_budget(
        make(device="cpu"), LARGE, 0, 32
    )


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_a_tiny_target_stays_a_minute_job_anywhere(num_gpus: int) -> None:
    config = resolve_budget(make(), TINY, num_gpus, 2)
    assert config.drafter.block_size == 8
    assert config.train.steps is not None
    assert 150 <= config.train.steps <= 400


def test_a_small_target_on_two_cores_takes_half_an_hour() -> None:
    """By the rates measured for 135 M parameters on two cores, in fp32."""
    config = resolve_budget(make(), SMALL, 0, 2)
    decoded = config.generate.num_prompts * config.generate.max_new_tokens
    sequences = config.train.batch_tokens // (128 + config.generate.max_new_tokens)
    anchors = config.train.steps * sequences * config.train.anchors_per_sequence
    measured = config.evaluate.num_prompts * config.evaluate.max_new_tokens
    minutes = (decoded / 85 + anchors / 40 + 2 * 1.5 * measured / 17) / 60
    assert 15 <= minutes <= 40


def test_work_shrinks_with_the_target_and_grows_with_the_machine() -> None:
    small, large = (resolve_budget(make(), size, 0, 2) for size in (SMALL, 10 * SMALL))
    many_cores = resolve_budget(make(), SMALL, 0, 8)
    for one, other in ((large, small), (small, many_cores)):
        assert one.train.steps < other.train.steps
        assert one.generate.num_prompts < other.generate.num_prompts


def test_layer_types_of_the_user_count_the_layers() -> None:
    config = make(drafter={"layer_types": ["full_attention"] * 3})
    assert resolve_budget(config, SMALL, 0, 2).drafter.num_layers == 3


@pytest.mark.parametrize(
    ("gate", "expected"),
    [({}, DEFAULT_MIN_TAU), ({"min_tau": 2.5}, 2.5), ({"min_acceptance_rate": 0.3}, None)],
)
def test_the_gates_threshold_has_a_default(gate: dict[str, float], expected: float | None) -> None:
    resolved = resolve_budget(make(gate=gate), SMALL, 0, 2).gate
    assert resolved.min_tau == expected
    assert resolved.min_acceptance_rate == gate.get("min_acceptance_rate")
