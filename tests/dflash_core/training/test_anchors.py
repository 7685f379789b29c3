"""Where anchors are drawn, and what their slots should say."""

from __future__ import annotations

import torch

from dflash_core.training.anchors import IGNORED, draw_anchors, pack_anchors


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


def test_teachers_are_where_the_target_itself_predicts_the_label() -> None:
    first, second = torch.arange(100, 110), torch.arange(200, 206)
    masks = [_mask(10, (4, 10)), _mask(6, (2, 6))]
    batch = pack_anchors([first, second], masks, [torch.tensor([4, 8]), torch.tensor([3])], 4)
    packed = torch.cat([first, second])
    labeled = batch.labels != IGNORED
    assert torch.equal(packed[batch.teachers[labeled] + 1], batch.labels[labeled])
