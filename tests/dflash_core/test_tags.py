"""The spelling of the registry's schema."""

from __future__ import annotations

import json

import pytest

from dflash_core import tags as t
from dflash_core.types import Interval

FINGERPRINT = "0123456789abcdef" * 4
ENTRY = t.ServeEntry(
    target_fingerprint=FINGERPRINT,
    target_path="/models/été",
    tau=4.0,
    tau_low=3.5,
    tau_high=4.5,
    outcome="promoted",
    job_identity="j",
    run_id="r",
    at="2026-11-30T12:00:00+00:00",
)


def test_names_hold_the_short_fingerprint() -> None:
    assert t.target_alias(FINGERPRINT) == "target-0123456789ab"
    assert t.serves_tag(FINGERPRINT) == "dflash.serves.0123456789ab"


@pytest.mark.parametrize("text", ["", "0123456789ab", FINGERPRINT.upper(), FINGERPRINT + "0"])
def test_only_a_whole_fingerprint_has_names(text: str) -> None:
    with pytest.raises(ValueError, match="sha256"):
        t.target_alias(text)


def test_serve_entries_make_the_round_trip() -> None:
    tags = {t.serves_tag(FINGERPRINT): t.format_serve_entry(ENTRY), t.BLOCK_SIZE: "8"}
    assert t.serve_entries(tags) == {FINGERPRINT: ENTRY}
    with pytest.raises(ValueError, match="keys"):
        t.format_serve_entry({**ENTRY, "more": 1})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", json.dumps({**ENTRY, "tau": "4"}), json.dumps({**ENTRY, "target_path": None})],
)
def test_what_a_foreign_hand_left_is_no_entry(text: str) -> None:
    assert t.serve_entries({t.serves_tag(FINGERPRINT): text}) == {}


def test_intervals_make_the_round_trip_and_missing_numbers_are_none() -> None:
    metrics = t.interval_metrics(t.TAU_CHAMPION, Interval(4.0, 3.5, 4.5))
    assert t.interval_from(metrics, t.TAU_CHAMPION) == Interval(4.0, 3.5, 4.5)
    assert t.interval_from(metrics, t.TAU_CANDIDATE) is None
    assert t.interval_from(metrics | {"tau.champion.low": float("nan")}, t.TAU_CHAMPION) is None
