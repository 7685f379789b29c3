"""The configuration refuses what cannot be meant, never changes, and flattens for MLflow."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from dflash_core.fingerprint import fingerprint
from pipelines.config import RealignConfig
from pipelines.fields import config_fields


def make(**values: object) -> RealignConfig:
    return RealignConfig.model_validate({"target": "some/target", **values})


def test_target_alone_is_enough() -> None:
    config = make()
    assert config.target == "some/target"
    assert config.train.learning_rate == 6e-4
    assert config.train.steps is None


def test_every_field_says_what_it_is() -> None:
    silent = [field.name for field in config_fields(RealignConfig) if not field.info.description]
    assert silent == []


@pytest.mark.parametrize(
    "values",
    [
        {"target": ""},
        {"seed": -1},
        {"model_name": "family/size"},
        {"train": {"steps": 0}},
        {"train": {"learning_rate": float("nan")}},
        {"train": {"learning_rate": 0}},
        {"train": {"stepz": 3}},
        {"drafter": {"block_size": 1}},
        {"drafter": {"target_layer_ids": []}},
        {"gate": {"max_loss": 1.0}},
        {"evaluate": {"temperature": -0.1}},
        {"device": "gpu"},
    ],
    ids=str,
)
def test_out_of_bounds_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        make(**values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train": {"steps": 3, "epochs": 1}}, "train.steps and train.epochs"),
        ({"gate": {"min_tau": 2.0, "min_acceptance_rate": 0.5}}, "gate.min_tau and"),
        ({"drafter": {"num_layers": 3, "layer_types": ["full_attention"]}}, "names 1 layers"),
        ({"drafter": {"layer_types": ["sliding_attention"]}}, "give drafter.sliding_window"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contradictions_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make(**values)


def test_a_configuration_never_changes() -> None:
    config = make()
    with pytest.raises(ValidationError):
        config.train.steps = 3  # type: ignore[misc]


def test_flat_gives_scalars_under_dotted_names() -> None:
    config = make(prompts="data/prompts.jsonl", drafter={"target_layer_ids": [1, 8, 15]}, train={"steps": 30})
    flat = config.flat()
    assert flat["target"] == "some/target"
    assert flat["prompts"] == "data/prompts.jsonl"
    assert flat["drafter.target_layer_ids"] == "1,8,15"
    assert flat["train.steps"] == 30
    assert flat["train.epochs"] is None
    assert set(flat) == {field.name for field in config_fields(RealignConfig)}
    assert all(value is None or isinstance(value, str | int | float) for value in flat.values())


def test_sections_have_an_identity_that_follows_their_values() -> None:
    def identity(config: RealignConfig) -> str:
        return fingerprint(config.train.model_dump(mode="json"))

    assert identity(make(train={"steps": 30})) == identity(make(train={"steps": 30}, seed=7))
    assert identity(make(train={"steps": 30})) != identity(make(train={"steps": 31}))


def test_import_is_light() -> None:
    """`--help` and a no-op rerun rest on this."""
    heavy = ["torch", "ray", "mlflow", "transformers", "numpy", "pyarrow"]
    code = (
        "import sys, pipelines.config, pipelines.cli, pipelines.budget, pipelines.telemetry\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
