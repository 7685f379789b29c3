"""A request means the same work wherever it is continued, and the machine's size only once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_core.toy.build import build_tiny_target
from pipelines import budget, kept_budget, prepare
from pipelines.config import RealignConfig
from pipelines.prepare import Prepared


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "target").path


@pytest.fixture(autouse=True)
def sized_by_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a tiny target's budget then follows the machine, as a larger one's does."""
    monkeypatch.setattr(budget, "TINY_PARAMETERS", 0)
    budget_of = budget._cpu
    monkeypatch.setattr(budget, "_cpu", lambda _parameters, num_cpus: budget_of(135_000_000, num_cpus))


def prepared(target: Path, store: Path, num_cpus: int, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(prepare, "cpu_budget", lambda: num_cpus)
    monkeypatch.chdir(store.parent)
    return prepare.prepare(RealignConfig(target=str(target), store=str(store)), lambda _event: None)


def test_a_larger_machine_goes_on_with_what_was_begun(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(target, tmp_path / "store", 2, monkeypatch)
    kept_budget.keep(first.context, first.asked)
    again = prepared(target, tmp_path / "store", 16, monkeypatch)
    assert again.context.config == first.context.config
    assert again.request == first.request
    elsewhere = prepared(target, tmp_path / "other", 16, monkeypatch)
    assert elsewhere.context.config.train.steps > first.context.config.train.steps  # type: ignore[operator]


def test_looking_alone_remembers_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = prepared(target, tmp_path / "store", 2, monkeypatch)
    large = prepared(target, tmp_path / "store", 16, monkeypatch)
    assert large.request != small.request


def test_what_another_version_wrote_is_not_believed(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(target, tmp_path / "store", 2, monkeypatch)
    first.asked.run(first.context, lambda _workspace: {"train": {"no_such_field": 1}})
    again = prepared(target, tmp_path / "store", 2, monkeypatch)
    assert again.context.config == first.context.config
