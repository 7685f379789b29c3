"""The definition of τ and its companions, checked against numbers counted by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.decoding.acceptance import (
    acceptance_by_position,
    acceptance_rate,
    by_domain,
    format_table,
    from_json,
    lossless,
    mean_seconds,
    prompt_tau,
    summary_json,
    tau,
    tau_from_rate,
    to_json,
    tokens_per_second,
)
from dflash_core.types import AcceptanceReport
from tests.dflash_core.acceptance_samples import BLOCK_SIZE, drawn, prompt, report

ONE = prompt("one", [2, 0, 3], [3, 1, 3], domain="math", seconds=2.0)  # stops inside the last round
TWO = prompt("two", [7], domain="chat", seconds=1.0)
NONE = prompt("none", [], domain="chat", seconds=0.0)  # over with the token of the prefill
REPORT = report(ONE, TWO, NONE)


def test_tau_is_a_ratio_of_sums() -> None:
    assert tau(REPORT) == (3 + 1 + 3 + 8) / 4
    assert prompt_tau(ONE) == 7 / 3
    assert prompt_tau(NONE) is None


def test_position_k_counts_rounds_that_accepted_the_first_k() -> None:
    assert acceptance_by_position(REPORT) == (3 / 4, 3 / 4, 2 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 4)


def test_without_a_round_there_is_no_number() -> None:
    empty = report(NONE)
    assert tau(empty) is None
    assert acceptance_by_position(empty) == ()
    assert tokens_per_second(empty) is None
    assert "no verify round" in format_table(empty)
    summary = json.loads(json.dumps(summary_json(empty), allow_nan=False))
    assert (summary["tau"], summary["prompts"], summary["rounds"]) == (None, 1, 0)
    assert mean_seconds(report()) is None


def test_domains_partition_the_report() -> None:
    domains = by_domain(REPORT)
    assert list(domains) == ["chat", "math"]
    assert (domains["chat"].tau, domains["chat"].prompts, domains["chat"].rounds) == (8.0, 2, 1)
    assert domains["chat"].acceptance_by_position == (1.0,) * 7
    assert domains["math"].tokens == 7
    assert by_domain(report(NONE))["chat"].tau is None


@given(st.integers(0, 2**32 - 1))
def test_tau_is_one_plus_the_sum_over_positions_where_no_answer_is_cut(seed: int) -> None:
    drawn_report = drawn(np.random.default_rng(seed), num_prompts=5)
    assert tau(drawn_report) == pytest.approx(1 + sum(acceptance_by_position(drawn_report)), abs=1e-12)
    rounds = sum(row.rounds for row in by_domain(drawn_report).values())
    assert rounds == drawn_report.rounds


def test_rate_and_tau_are_two_units_of_one_thing() -> None:
    assert acceptance_rate(BLOCK_SIZE, BLOCK_SIZE) == 1
    assert acceptance_rate(1.0, BLOCK_SIZE) == 0
    assert tau_from_rate(0.25, 9) == 3
    assert acceptance_rate(tau_from_rate(0.3, 16), 16) == pytest.approx(0.3)
    with pytest.raises(ValueError, match="no draft token"):
        acceptance_rate(1.0, 1)


@pytest.mark.parametrize(
    ("compared", "expected"),
    [
        ([True, True], True),
        ([True, False], False),
        ([None, False], False),
        ([True, None], None),
        ([None], None),
        ([], None),
    ],
)
def test_lossless_needs_every_prompt(compared: list[bool | None], expected: bool | None) -> None:
    assert lossless(report(*(prompt(str(i), [1], lossless=c) for i, c in enumerate(compared)))) is expected


def test_speed_counts_the_rounds_tokens_and_seconds() -> None:
    assert tokens_per_second(REPORT) == 15 / 3
    assert mean_seconds(REPORT) == 1


def test_json_gives_the_equal_report_back() -> None:
    original = drawn(np.random.default_rng(3))
    original = replace(original, prompts=(*original.prompts, ONE, NONE, prompt("x", [1], seconds=0.1 + 0.2)))
    assert from_json(json.loads(json.dumps(to_json(original)))) == original


@pytest.mark.parametrize(
    "change",
    [
        {"accepted": [1], "emitted": [2, 1]},  # a round without its tokens
        {"accepted": [8], "emitted": [9]},  # more drafts than a block holds
        {"accepted": [2], "emitted": [1]},  # accepted drafts that were not emitted
        {"accepted": [0], "emitted": [0]},  # a round that emitted nothing
        {"accepted": [0], "emitted": [2]},  # more than one bonus token
        {"accepted": ["1"], "emitted": ["2"]},
        {"seconds": float("nan")},
        {"surprise": 1},
    ],
)
def test_a_report_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    data = to_json(report(ONE))
    data["prompts"] = [{**data["prompts"][0], **change}]
    with pytest.raises(ValueError, match=r"report|contradicts"):
        from_json(data)


def test_a_report_with_a_field_missing_is_refused() -> None:
    data = to_json(REPORT)
    del data["prompts"]
    with pytest.raises(ValueError, match="prompts"):
        from_json(data)


def test_summary_holds_what_the_job_prints() -> None:
    summary = json.loads(json.dumps(summary_json(REPORT), allow_nan=False))
    assert (summary["tau"], summary["tokens"], summary["rounds"], summary["prompts"]) == (3.75, 15, 4, 3)
    assert summary["acceptance_by_position"] == list(acceptance_by_position(REPORT))
    assert summary["lossless"] is True
    assert summary["by_domain"]["math"]["tau"] == 7 / 3
    assert [row["tau"] for row in summary["by_prompt"]] == [7 / 3, 8, None]


def test_table_in_unicode() -> None:
    lines = format_table(REPORT, unicode=True).splitlines()
    assert "all domains        3       15        4    3.750" in lines
    assert "lossless: yes" in lines
    assert f"  1 {'█' * 30}{' ' * 10}  75.0%" in lines


def test_table_in_ascii_is_ascii() -> None:
    table = format_table(report(replace(TWO, domain="数学")), unicode=False)
    assert table.isascii()
    assert f"  1 {'#' * 40} 100.0%" in table.splitlines()
    assert "domain       prompts   tokens   rounds      tau" in table.splitlines()


def test_columns_align_whatever_the_script() -> None:
    mixed = report(replace(ONE, domain="数学"), TWO)
    for unicode, shorter in ((True, 2), (False, 0)):
        # A Chinese character takes two columns, so its row has fewer characters than the others.
        starts = ("数学 ", "?? ", "all ")
        rows = [line for line in format_table(mixed, unicode=unicode).splitlines() if line.startswith(starts)]
        assert len(rows[0]) == len(rows[1]) - shorter


def test_a_domain_cannot_steer_the_terminal() -> None:
    table = format_table(report(replace(ONE, domain="\x1b[2Jmath\n")), unicode=True)
    assert "\x1b" not in table
    assert "?[2Jmath?" in table


def test_unverified_output_is_said_so() -> None:
    one: AcceptanceReport = report(prompt("a", [1], lossless=False))
    assert "lossless: NO" in format_table(one, unicode=True)
    assert "not compared" in format_table(report(prompt("a", [1], lossless=None)), unicode=True)
