"""Chunked and flex attention against a dense mask: values and gradients."""

from __future__ import annotations

import pytest
import torch

from dflash_core.models import attention
from dflash_core.models.attention import AnchorLayout, anchored_attention, dense_mask, visible
from dflash_core.training.anchors import draw_anchors, pack_anchors

KINDS = [(False, None), (True, 7), (False, 9), (True, None), (False, 1)]


@pytest.fixture
def layout() -> AnchorLayout:
    """Three documents, of which the second is so short that it holds few anchors."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 50, (n,), generator=generator) for n in (40, 9, 77)]
    masks = [torch.arange(len(d)) >= 5 for d in documents]
    anchors = [draw_anchors(mask, 12, generator) for mask in masks]
    return pack_anchors(documents, masks, anchors, 4).layout


def _tensors(layout: AnchorLayout, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    queries, context = layout.num_anchors * layout.block_size, layout.context_length
    shapes = ((4, queries, 8), (2, context, 8), (2, context, 8), (2, queries, 8), (2, queries, 8))
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _dense(
    tensors: list[torch.Tensor], layout: AnchorLayout, causal: bool, window: int | None
) -> torch.Tensor:
    """Softmax attention written out, heads repeated by hand."""
    q, k_context, v_context, k_block, v_block = tensors
    keys = torch.cat([k_context, k_block], dim=1).repeat_interleave(2, dim=0)
    values = torch.cat([v_context, v_block], dim=1).repeat_interleave(2, dim=0)
    scores = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    hidden = ~dense_mask(layout, causal=causal, window=window)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values


@pytest.mark.parametrize(("causal", "window"), KINDS)
@pytest.mark.parametrize("chunk_queries", [4, 16, 128])
def test_chunks_equal_the_dense_mask(
    layout: AnchorLayout,
    causal: bool,
    window: int | None,
    chunk_queries: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_CHUNK_QUERIES", chunk_queries)
    tensors = _tensors(layout)
    expected = _dense(tensors, layout, causal, window)
    output = anchored_attention(*tensors, layout, causal=causal, window=window)
    assert (output - expected).abs().max() < 1e-12
    weight = torch.randn_like(expected)
    for mine, reference in zip(
        torch.autograd.grad((output * weight).sum(), tensors),
        torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    ):
        assert (mine - reference).abs().max() < 1e-11


@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_the_flex_mask_of_gpus_equals_the_dense_mask(
    layout: AnchorLayout, causal: bool, window: int | None
) -> None:
    """Uncompiled, forward only: what CPUs can run of it."""
    tensors = [t.detach() for t in _tensors(layout, torch.float32)]
    output = attention._flex(*tensors, layout, causal=causal, window=window)
    assert (output - _dense(tensors, layout, causal, window)).abs().max() < 1e-5


@pytest.mark.parametrize("window", [None, 3, 60])
@pytest.mark.parametrize("size", [3, 16, 128, 200])
def test_the_tiles_are_those_with_something_to_see(size: int, window: int | None) -> None:
    torch.manual_seed(1)
    starts, positions, offset = [], [], 0
    for length in (300, 1, 150):
        chosen = torch.randperm(length)[:20].sort().values
        starts.append(torch.full_like(chosen, offset))
        positions.append(chosen)
        offset += length
    layout = AnchorLayout(torch.cat(starts), torch.cat(positions), size, offset)
    mask = attention.dense_mask(layout, causal=False, window=None if window is None else window)
    rows, columns = (-(-n // 128) for n in mask.shape)
    padded = torch.zeros(rows * 128, columns * 128, dtype=torch.bool)
    padded[: mask.shape[0], : mask.shape[1]] = mask
    expected = padded.view(rows, 128, columns, 128).any(dim=3).any(dim=1)
    found = attention.visible_tiles(layout, window=window).bool()
    assert not (expected & ~found).any()
    if window is None:
        assert torch.equal(found, expected)


def test_the_flex_mask_costs_little_at_the_papers_sizes() -> None:
    """4 x 512 anchors of 16 over 4 x 3,072 tokens: entry by entry the mask is 1.5 billion long."""
    positions = torch.arange(512).repeat(4) * 6
    starts = torch.arange(4).repeat_interleave(512) * 3072
    layout = AnchorLayout(starts, positions, 16, 4 * 3072)
    mask = attention._block_mask(layout, causal=False, window=None)
    assert mask.kv_indices.shape == (1, 1, 256, 352)
    assert mask.sparsity() > 90


def test_the_compiler_takes_batch_after_batch_without_compiling_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only its tracing is real here, and how often it is asked to: CPUs have no kernel to compile."""
    from torch._dynamo.testing import CompileCounter
    from torch.nn.attention import flex_attention as flex

    counter, frames = CompileCounter(), []
    compiled = torch.compile(flex.flex_attention, dynamic=True, backend=counter)
    monkeypatch.setattr(flex, "flex_attention", compiled)
    for count in (3, 4, 5, 2):
        starts = torch.arange(count).repeat_interleave(9) * 30
        layout = AnchorLayout(starts, torch.arange(9).repeat(count) * 3, 16, 30 * count)
        tensors = [t.detach() for t in _tensors(layout, torch.float32)]
        with torch.no_grad():
            output = attention._flex(*tensors, layout, causal=False, window=None)
        assert (output - _dense(tensors, layout, False, None)).abs().max() < 1e-5
        frames.append(counter.frame_count)
    assert frames[1] == frames[3]


@pytest.mark.parametrize(("causal", "window"), KINDS)
def test_the_mask_says_what_the_paper_says(layout: AnchorLayout, causal: bool, window: int | None) -> None:
    """Entry by entry, from the words: strictly earlier context of the same document, and the own block."""
    size = layout.block_size
    lengths, first = [40, 9, 77], {}
    offset = 0
    for length in lengths:
        first.update(dict.fromkeys(range(offset, offset + length), offset))
        offset += length
    mask = dense_mask(layout, causal=causal, window=window)
    for query in range(mask.shape[0]):
        anchor, slot = divmod(query, size)
        start, position = int(layout.doc_starts[anchor]), int(layout.positions[anchor])
        for key in range(mask.shape[1]):
            if key < layout.context_length:
                at = key - first[key]
                seen = first[key] == start and at < position
            else:
                other, other_slot = divmod(key - layout.context_length, size)
                at = position + other_slot
                seen = other == anchor
            distance = position + slot - at
            if causal:
                seen = seen and distance >= 0
            if window is not None:
                seen = seen and distance < window and (causal or -distance < window)
            assert bool(mask[query, key]) == seen


def test_visible_broadcasts() -> None:
    layout = AnchorLayout(torch.tensor([0]), torch.tensor([3]), 2, 5)
    seen = visible(layout, torch.tensor([[0], [1]]), torch.arange(7)[None], causal=False, window=None)
    assert seen.tolist() == [[True, True, True, False, False, True, True]] * 2
