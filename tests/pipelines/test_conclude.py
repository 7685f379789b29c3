"""The decision must be about the champion that there is when it takes effect."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dflash_core.errors import ExitCode, LeaseHeldError
from pipelines.conclude import _check_champion


def _drafter(fingerprint: str | None, version: int = 1) -> Any:
    if fingerprint is None:
        return None
    return SimpleNamespace(drafter_fingerprint=fingerprint, version=version)


def _check(seen: str | None, now: str | None, candidate: str = "new") -> None:
    registry = SimpleNamespace(name="toy", parent_for=lambda _target: _drafter(now, version=7))
    checkpoint = SimpleNamespace(fingerprint="t" * 64)
    prepared: Any = SimpleNamespace(registry=registry, context=SimpleNamespace(checkpoint=checkpoint))
    champion = SimpleNamespace(registered=_drafter(seen)) if seen else None
    subject = SimpleNamespace(fingerprint=candidate)
    evidence: Any = SimpleNamespace(champion=champion, candidate=subject)
    _check_champion(prepared, evidence)


@pytest.mark.parametrize(("seen", "now"), [(None, None), ("old", "old"), ("old", "new"), (None, "new")])
def test_nothing_changed_or_a_killed_run_had_promoted_this_very_drafter(
    seen: str | None, now: str | None
) -> None:
    _check(seen, now)


@pytest.mark.parametrize(("seen", "now"), [(None, "other"), ("old", "other"), ("old", None)])
def test_a_champion_that_nobody_compared_with_is_not_replaced(seen: str | None, now: str | None) -> None:
    with pytest.raises(LeaseHeldError, match="Run again") as caught:
        _check(seen, now)
    assert caught.value.exit_code == ExitCode.LEASE_HELD
