"""Rows that come, go, grow and are cut back by themselves see exactly what a plain forward sees."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dflash_core.generation.row_cache import STEP, moves
from dflash_core.models.target import Target
from tests.dflash_core.small_models import random_prompt, random_target, sliding_target

TARGETS = {
    "qwen3": lambda: random_target("qwen3"),
    "qwen2": lambda: random_target("qwen2"),
    "llama": lambda: random_target("llama"),
    "sliding": lambda: sliding_target(window=5),
}


def _plain(target: Target, ids: list[int]) -> Tensor:
    """Logits and features of the last token, from one forward of the whole sequence."""
    output = target.forward(torch.tensor([ids]), layer_ids=(1, 3))
    return torch.cat([output.logits[0, -1], output.features[0, -1]])


@pytest.mark.parametrize("name", TARGETS)
def test_rows_that_keep_different_counts_equal_plain_forwards(name: str) -> None:
    """As batched speculative decoding does it: blocks of several tokens, of which each row keeps some."""
    target, drawn = TARGETS[name](), random.Random(1)
    sequences = [random_prompt(length, seed=length) for length in (3, 11, 7)]
    cache = target.new_rows()
    cache.add_rows(3)
    padded = torch.tensor([ids + [0] * (11 - len(ids)) for ids in sequences])
    last = torch.tensor([len(ids) - 1 for ids in sequences])
    output = target.forward_rows(padded, cache, logits_at=last)
    cache.keep([len(ids) for ids in sequences])
    for row, ids in enumerate(sequences):
        torch.testing.assert_close(output.logits[row, 0], target.forward(torch.tensor([ids])).logits[0, -1])
    for _ in range(6):
        block = torch.tensor([[drawn.randrange(90) for _ in range(4)] for _ in sequences])
        output = target.forward_rows(block, cache, layer_ids=(1, 3))
        counts = [drawn.randint(1, 4) for _ in sequences]
        cache.keep(counts)
        for row, count in enumerate(counts):
            sequences[row] = sequences[row] + block[row, :count].tolist()
            got = torch.cat([output.logits[row, count - 1], output.features[row, count - 1]])
            torch.testing.assert_close(got, _plain(target, sequences[row]), atol=2e-5, rtol=2e-5)
    assert cache.lengths == [len(ids) for ids in sequences]


@pytest.mark.parametrize("name", ["qwen3", "sliding"])
def test_a_row_that_is_cut_back_goes_on_as_if_nothing_had_been_there(name: str) -> None:
    target = TARGETS[name]()
    cache = target.new_rows()
    cache.add_rows(2)
    ids = [random_prompt(12, seed=1), random_prompt(12, seed=2)]
    target.forward_rows(torch.tensor(ids), cache)
    cache.keep([12, 12])
    cache.crop([4, 99])
    assert cache.lengths == [4, 12]
    output = target.forward_rows(torch.tensor([[8], [9]]), cache, layer_ids=(1, 3))
    cache.keep([1, 1])
    for row, sequence in enumerate(([*ids[0][:4], 8], [*ids[1], 9])):
        got = torch.cat([output.logits[row, -1], output.features[row, -1]])
        torch.testing.assert_close(got, _plain(target, sequence), atol=2e-5, rtol=2e-5)


def test_rows_leave_and_others_are_appended_and_room_grows() -> None:
    target, drawn = random_target(), random.Random(2)
    cache, sequences = target.new_rows(), []

    def add(*lengths: int) -> None:
        other = target.new_rows()
        other.add_rows(len(lengths))
        ids = [random_prompt(length, seed=length) for length in lengths]
        widest = max(lengths)
        target.forward_rows(torch.tensor([row + [0] * (widest - len(row)) for row in ids]), other)
        other.keep(list(lengths))
        cache.append(other)
        sequences.extend(ids)

    def drop(*rows: int) -> None:
        for place, mover in moves(len(sequences), rows):
            sequences[place] = sequences[mover]
        del sequences[len(sequences) - len(rows) :]
        cache.drop(rows)

    add(5, 9, STEP - 2)
    drop(0)
    add(7, 3)
    drop(1, 3)
    add(20)
    for _ in range(4):  # past the room of the first step
        tokens = [drawn.randrange(90) for _ in sequences]
        output = target.forward_rows(torch.tensor(tokens)[:, None], cache, layer_ids=(1, 3))
        cache.keep([1] * len(tokens))
        for row, token in enumerate(tokens):
            sequences[row] = [*sequences[row], token]
            got = torch.cat([output.logits[row, -1], output.features[row, -1]])
            torch.testing.assert_close(got, _plain(target, sequences[row]), atol=2e-5, rtol=2e-5)
    assert max(cache.lengths) > STEP
    assert cache.room[1] == 2 * STEP


def test_few_rows_move_when_rows_leave() -> None:
    assert moves(5, [4]) == []
    assert moves(5, [0]) == [(0, 4)]
    assert moves(5, [1, 4, 0]) == [(0, 2), (1, 3)]
    assert moves(3, [0, 1, 2]) == []
