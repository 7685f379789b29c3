"""Turns of a conversation become one sample exactly where the later ids go on from the earlier."""

from __future__ import annotations

from dflash_core.corpus.turns import merge_turns
from dflash_core.types import Sample

FIRST = Sample("a", "d", (1, 2, 3, 9), ((2, 4),))
SECOND = Sample("a#2", "d", (1, 2, 3, 9, 5, 6, 7, 9), ((6, 8),))
THIRD = Sample("a#3", "d", (*SECOND.input_ids, 5, 8, 9), ((10, 11),))


def test_turns_that_extend_each_other_are_one_sample_with_all_their_spans() -> None:
    (merged,) = merge_turns([FIRST, SECOND, THIRD])
    assert merged == Sample("a", "d", THIRD.input_ids, ((2, 4), (6, 8), (10, 11)))
    supervised = [merged.input_ids[s:e] for s, e in merged.spans]
    assert supervised == [(3, 9), (7, 9), (9,)]


def test_an_earlier_answer_that_is_rendered_otherwise_stays_a_sample_of_its_own() -> None:
    without_thinking = Sample("a#2", "d", (1, 2, 9, 5, 6, 7, 9), ((5, 7),))
    assert merge_turns([FIRST, without_thinking]) == [FIRST, without_thinking]
    later = Sample("a#3", "d", (*without_thinking.input_ids, 5, 7), ((8, 9),))
    assert merge_turns([FIRST, without_thinking, later]) == [
        FIRST,
        Sample("a#2", "d", later.input_ids, ((5, 7), (8, 9))),
    ]


def test_nothing_is_merged_that_has_no_turn_in_between() -> None:
    same = Sample("b", "d", FIRST.input_ids, FIRST.spans)
    touching = Sample("c", "d", (*FIRST.input_ids, 7), ((4, 5),))
    assert merge_turns([FIRST, same]) == [FIRST, same]
    assert merge_turns([FIRST, touching]) == [FIRST, touching]
    assert merge_turns([]) == []
