"""Anchors, labels, weights and the chunked loss against direct, slow versions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from dflash_core import objective
from dflash_core.objective import (
    IGNORED,
    block_loss,
    default_gamma,
    draw_anchors,
    pack_anchors,
    position_weights,
)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _mask(length: int, *spans: tuple[int, int]) -> torch.Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return mask


def test_anchors_lie_in_the_response_and_have_something_to_predict() -> None:
    for length, start in ((30, 10), (12, 10), (11, 10), (10, 10), (5, 1)):
        anchors = draw_anchors(_mask(length, (start, length)), 1000, _generator())
        assert anchors.tolist() == list(range(start, max(start, length - 1)))
    assert len(draw_anchors(_mask(100, (20, 100)), 7, _generator())) == 7


def test_anchors_lie_in_every_response_of_a_conversation_and_nowhere_else() -> None:
    mask = _mask(20, (3, 6), (9, 10), (14, 20))
    assert draw_anchors(mask, 1000, _generator()).tolist() == [3, 4, 14, 15, 16, 17, 18]


def test_anchors_are_redrawn_and_cover_the_response() -> None:
    generator = _generator()
    draws = [draw_anchors(_mask(60, (10, 60)), 5, generator).tolist() for _ in range(200)]
    assert len({tuple(d) for d in draws}) > 190
    assert {a for d in draws for a in d} == set(range(10, 59))


def test_labels_are_the_next_tokens_and_never_cross_a_document() -> None:
    first, second = torch.arange(100, 110), torch.arange(200, 206)
    everything = [_mask(10, (0, 10)), _mask(6, (0, 6))]
    batch = pack_anchors([first, second], everything, [torch.tensor([4, 8]), torch.tensor([3])], 4)
    assert batch.anchor_ids.tolist() == [104, 108, 203]
    assert batch.labels.tolist() == [
        [105, 106, 107],
        [109, IGNORED, IGNORED],
        [204, 205, IGNORED],
    ]
    assert batch.layout.doc_starts.tolist() == [0, 0, 10]
    assert batch.layout.context_length == 16


def test_labels_never_cross_the_end_of_a_response() -> None:
    ids = torch.arange(100, 112)
    mask = _mask(12, (2, 6), (8, 12))
    batch = pack_anchors([ids], [mask], [torch.tensor([2, 4, 8])], 6)
    assert batch.labels.tolist() == [
        [103, 104, 105, IGNORED, IGNORED],
        [105, IGNORED, IGNORED, IGNORED, IGNORED],
        [109, 110, 111, IGNORED, IGNORED],
    ]


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_papers_decay(block: int, gamma: float) -> None:
    assert default_gamma(block) == gamma
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, block)]
    assert position_weights(block, gamma).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rows", [1, 3, 2048])
def test_the_chunked_loss_equals_cross_entropy(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "_HEAD_ROWS", rows)
    torch.manual_seed(0)
    hidden = torch.randn(6, 5, 12, dtype=torch.float64, requires_grad=True)
    head = torch.randn(40, 12, dtype=torch.float64)
    labels = torch.randint(0, 40, (6, 4))
    labels[1, 2:], labels[4, 1:] = IGNORED, IGNORED
    weights = position_weights(5, 2.0).double()
    result = block_loss(hidden, head, labels, weights)
    logits = hidden[:, 1:] @ head.T
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    direct = (each.view(6, 4) * weights).sum()
    assert result.total.item() == pytest.approx(float(direct), rel=1e-5)
    mine = torch.autograd.grad(result.total, hidden)[0]
    reference = torch.autograd.grad(direct, hidden)[0]
    # Logits are taken to float32 for the softmax.
    assert (mine - reference).abs().max() < 1e-5
    assert result.weight == pytest.approx(float((weights * (labels != IGNORED)).sum()))


def test_the_proxy_counts_whole_prefixes_only() -> None:
    head = torch.eye(4)
    labels = torch.tensor([[1, 2, 3], [1, 2, IGNORED], [1, 1, 1]])
    guesses = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 3], [0, 0, 1, 1]])
    result = block_loss(head[guesses], head, labels, position_weights(4, 4.0))
    # Blocks accept 3, 1 and 0 drafts: a right guess behind a wrong one counts for nothing.
    assert (result.chain, result.blocks) == (4.0, 3)
