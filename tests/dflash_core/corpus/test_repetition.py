"""Endless repetition is told from honest answers that repeat a little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.corpus.repetition import repeats_endlessly


@given(
    start=st.lists(st.integers(0, 50), max_size=40),
    passage=st.lists(st.integers(0, 50), min_size=1, max_size=64),
    cut=st.integers(0, 63),
)
def test_a_passage_repeated_to_the_end_is_found(start: list[int], passage: list[int], cut: int) -> None:
    rounds = -(-max(32, 4 * len(passage)) // len(passage))
    assert repeats_endlessly(start + passage * rounds + passage[: cut % len(passage)])


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        [7] * 15,
        [9] + [7] * 30,
        [1, 2, 3, 4, 5] * 3,
        list(range(100)),
        [1, 2, 3] * 20 + [9],
        list(range(64)) * 3,
        [number for n in range(30) for number in (5, 6, n)],
    ],
)
def test_honest_answers_stay(ids: list[int]) -> None:
    assert not repeats_endlessly(ids)


def test_a_short_answer_that_is_nothing_else_is_found() -> None:
    assert repeats_endlessly([0] * 24)
    assert repeats_endlessly([1, 2, 3, 4] * 4)
