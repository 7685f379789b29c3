"""The command line: every field reachable, and every mistake one sentence that says the remedy."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import ExitCode, LeaseHeldError, UserError
from pipelines.cli import INTERRUPTED, parse, run_job
from pipelines.config import RealignConfig
from pipelines.fields import ConfigField, config_fields
from pipelines.measure_config import MeasureConfig
from pipelines.prune_config import PruneConfig


def read(*argv: str) -> RealignConfig:
    return parse(RealignConfig, argv, description="test")[0]


def complaint(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        read(*argv)
    return str(caught.value)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


NEEDS = {
    "select.by": ("--select.fraction", "0.5"),
    "select.anchors_per_answer": ("--select.fraction", "0.5"),
    "train.lora_rank": ("--train.mode", "lora"),
    "train.chain_epochs": ("--train.anchors", "chain"),
    "train.decay_fraction": ("--train.schedule", "wsd"),
}
"""What a field needs beside it to have an effect."""


def sample_of(field: ConfigField) -> str:
    """A value that is allowed and not the default."""
    special = {
        "generate.max_new_tokens": "5",
        "drafter.layer_types": "full_attention,full_attention",
        "gate.num_resamples": "200",
        "gate.confidence": "0.9",
        "gate.min_tau": "2",
    }
    others = [choice for choice in field.choices if choice != field.info.default]
    if field.name in special or others:
        return special.get(field.name) or others[-1]
    return {"INT": "3", "FLOAT": "0.5", "INT,INT,...": "1,2"}.get(field.metavar, "some-text")


@pytest.mark.parametrize("field", list(config_fields(RealignConfig)), ids=lambda field: field.name)
def test_every_field_is_a_flag(field: ConfigField) -> None:
    argv = ["--target", "t"] if field.name != "target" else []
    config = read(
        *argv, *NEEDS.get(field.name, ()), field.flag, *([] if field.type is bool else [sample_of(field)])
    )
    value = config.flat()[field.name]
    assert value not in (None, field.info.default)


@pytest.mark.parametrize("name", sorted(NEEDS))
def test_a_field_that_nothing_would_read_is_refused(name: str) -> None:
    field = next(f for f in config_fields(RealignConfig) if f.name == name)
    assert f"has no effect without {NEEDS[name][0][2:]}" in complaint(
        "--target", "t", field.flag, sample_of(field)
    )


def test_dashes_and_underscores_are_the_same_in_a_flag_but_not_in_a_value() -> None:
    assert read("--target=a_b", "--train.learning_rate", "1e-3") == read(
        "--target", "a_b", "--train.learning-rate=0.001"
    )


def test_flags_override_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "job.toml", 'target = "t"\nseed = 1\n[train]\nsteps = 5\nlearning_rate = 0.01\n')
    config = read("--config", file, "--train.steps", "7")
    assert (config.seed, config.train.steps, config.train.learning_rate) == (1, 7, 0.01)


def test_a_switch_can_be_switched_off_again(tmp_path: Path) -> None:
    file = write(tmp_path / "job.toml", 'target = "t"\n[extract]\nlast_hidden = true\n')
    assert read("--config", file).extract.last_hidden
    assert not read("--config", file, "--no-extract.last-hidden").extract.last_hidden


def test_a_jobs_own_flags_come_back_beside_the_configuration() -> None:
    def extra(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--dry-run", action="store_true")

    config, options = parse(RealignConfig, ["--target", "t", "--dry_run"], description="", extra=extra)
    assert (config.target, options.dry_run) == ("t", True)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "--target is missing; pass --target TEXT"),
        (["--targt", "t"], "unknown flag --targt; did you mean --target?"),
        (["--steps=3"], "unknown flag --steps; did you mean --train.steps?"),
        (
            ["--train.learnin-rate", "1"],
            "unknown flag --train.learnin-rate; did you mean --train.learning-rate?",
        ),
        (["--qqqq"], "unknown flag --qqqq; see --help for those there are"),
        (["t"], "'t' belongs to no flag; name the flag before it, see --help"),
        (["--target"], "argument --target: expected one argument; see --help"),
        (["--target", "t", "--train.steps", "many"], "--train.steps is 'many'; pass a whole number >= 1"),
        (["--target", "t", "--train.steps", "1.5"], "--train.steps is '1.5'; pass a whole number >= 1"),
        (["--target", "t", "--seed", "-1"], "--seed is '-1'; pass a whole number >= 0 and < 2147483648"),
        (["--target", "t", "--gate.max-loss", "nan"], "--gate.max-loss is 'nan'; pass a number >= 0 and < 1"),
        (["--target", "t", "--device", "gpu"], "--device is 'gpu'; pass one of auto, cpu, cuda"),
        (["--target", "t", "--store", ""], "--store is ''; pass text that is not empty"),
        (
            ["--target", "t", "--model-name", "a/b"],
            "--model-name is 'a/b'; pass a name without / and :, such as qwen3-8b",
        ),
        (
            ["--target", "t", "--drafter.target-layer-ids", "1,a"],
            "--drafter.target-layer-ids is '1,a'; pass one or more whole numbers, joined by commas",
        ),
        (
            ["--target", "t", "--drafter.layer-types", "full"],
            (
                "--drafter.layer-types is 'full'; "
                "pass one or more of full_attention, sliding_attention, joined by commas"
            ),
        ),
        (
            ["--target", "t", "--train.steps", "0", "--seed", "-1"],
            "--seed is '-1'; pass a whole number >= 0 and < 2147483648 (1 more like this)",
        ),
        (
            ["--target", "t", "--train.steps", "3", "--train.epochs", "3"],
            "train.steps and train.epochs both say how long to train; give one of them",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_one_sentence(argv: list[str], expected: str) -> None:
    assert complaint(*argv) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('target = "t"\n[train]\nstep = 3\n', "has an unknown key train.step; did you mean train.steps?"),
        ('target = "t"\nmax-loss = 0.1\n', "has an unknown key max-loss; did you mean gate.max_loss?"),
        ('target = "t"\n[trian]\nsteps = 3\n', "has an unknown key trian; did you mean train?"),
        (
            'target = "t"\n"train.steps" = 3\n',
            "has the key 'train.steps' in quotes; write steps below [train]",
        ),
        ('target = "t"\nqqqq = 1\n', "has an unknown key qqqq; see --help for those there are"),
        ('target = "t"\ntrain = 3\n', "must be a table; write [train] and its keys below"),
        ('target = "t"\n[train]\nsteps = "x"\n', "train.steps in {file} is 'x'; pass a whole number >= 1"),
        ('target = "t"\n[train]\nsteps = 1.5\n', "train.steps in {file} is 1.5; pass a whole number >= 1"),
        ('target = "t\n', "is not valid TOML"),
    ],
    ids=repr,
)
def test_a_wrong_file_is_one_sentence_that_names_it(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path / "job.toml", text)
    message = complaint("--config", file)
    assert expected.format(file=file) in message
    assert file in message
    assert "\n" not in message


def test_a_table_that_is_none_is_named_even_when_a_flag_goes_into_it(tmp_path: Path) -> None:
    file = write(tmp_path / "job.toml", 'target = "t"\ntrain = 3\n')
    assert complaint("--config", file, "--train.steps", "3").startswith(f"train in {file} must be a table")


@pytest.mark.parametrize("name", ["missing.toml", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    assert complaint("--config", str(tmp_path / name)).endswith("; pass a TOML file")


@given(st.lists(st.text(max_size=20), max_size=6))
def test_any_words_at_all_give_a_configuration_or_one_sentence(words: list[str]) -> None:
    try:
        read("--target", "t", *[word for word in words if not word.startswith(("-h", "--help"))])
    except UserError as error:
        assert str(error)


def job(body: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """A job whose `main(argv)` is `body`, run as a user runs it."""
    code = (
        "from dflash_core.errors import LeaseHeldError, UserError\n"
        "from pipelines.cli import parse, run_job\n"
        "from pipelines.config import RealignConfig\n"
        f"def main(argv):\n    {body}\n"
        "run_job(main)\n"
    )
    command = [sys.executable, "-c", code, *argv]
    wide = {**os.environ, "COLUMNS": "1000"}  # keeps argparse from breaking lines
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=wide)


def test_help_shows_every_flag_with_its_docstring() -> None:
    ended = job("parse(RealignConfig, argv, description='Align.')", "--help")
    assert ended.returncode == 0
    assert ended.stderr == ""
    for field in config_fields(RealignConfig):
        assert field.flag in ended.stdout
        assert (field.info.description or "?") in ended.stdout
    assert "Peak learning rate. (> 0 and <= 1; default: 0.0006)" in ended.stdout


MODELS = (RealignConfig, MeasureConfig, PruneConfig)


@pytest.mark.parametrize(
    "field", [f for model in MODELS for f in config_fields(model)], ids=lambda field: field.name
)
def test_nobody_is_shown_a_pattern_or_an_empty_tuple(field: ConfigField) -> None:
    patterns = [p for c in field.info.metadata if (p := getattr(c, "pattern", None))]
    said = [field.allowed(), field.bounds, field.default()]
    assert not any(pattern in text for pattern in patterns for text in said)
    assert "()" not in field.default()
    if patterns:
        examples = re.findall(r"[\w.-]+", field.allowed().partition("such as")[2].replace(" or ", " "))
        assert examples
        assert all(re.fullmatch(pattern, example) for pattern in patterns for example in examples)


def test_what_is_unset_is_not_called_auto() -> None:
    fields = {f.name: f for model in (MeasureConfig, PruneConfig) for f in config_fields(model)}
    assert [
        name for name, field in fields.items() if field.default() == "default: auto" and not field.choices
    ] == []
    assert fields["ignore_registries"].metavar == "URI"
    with pytest.raises(UserError, match="--older-than is '10'; pass an age such as 14d"):
        parse(PruneConfig, ["--older-than", "10"], description="")


def test_a_users_mistake_leaves_no_traceback() -> None:
    ended = job("raise UserError('no such target; pass another')")
    assert (ended.returncode, ended.stderr) == (ExitCode.BAD_INPUT, "error: no such target; pass another\n")


def test_our_own_mistake_leaves_one() -> None:
    ended = job("raise RuntimeError('oops')")
    assert ended.returncode == ExitCode.INTERNAL
    assert "Traceback" in ended.stderr
    assert "oops" in ended.stderr


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(LeaseHeldError("held"), ExitCode.LEASE_HELD), (KeyboardInterrupt(), INTERRUPTED), (ExitCode.HELD, 4)],
    ids=repr,
)
def test_exit_codes(outcome: BaseException | int, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def main(_argv: list[str]) -> int:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    with pytest.raises(SystemExit) as caught:
        run_job(main, [])
    assert caught.value.code == code
    if isinstance(outcome, KeyboardInterrupt):
        assert "run the same command again to continue" in capsys.readouterr().err
