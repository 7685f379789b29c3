"""Attention of draft blocks over target features: many anchors at once (training), or one block (decoding).

Training packs several documents into one row of context keys. Every anchor a of a document sees
that document's context strictly before a and its own block, nothing else. A dense mask would spend
most of its work on entries that it hides: [anchors x block, context + anchors x block]. On CPU the
anchors come sorted, and runs of neighbors ("chunks") attend to the prefix they need, so
what remains hidden is a chunk's own triangle. On CUDA the same mask is a flex-attention block mask.
Both equal the dense reference in `dense_mask`, values and gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_TILE = 128
"""Queries, and keys, in one tile of flex attention's mask; its kernels' own default."""
_CHUNK_QUERIES = 128
"""Queries (anchors x block) in one CPU chunk: small enough that little of the chunk's own
[queries, queries] square is wasted, large enough to amortize a kernel call."""


@dataclass(frozen=True)
class AnchorLayout:
    """Where the anchors of a packed batch sit. Anchors are sorted by (document, position)."""

    doc_starts: Tensor
    """[anchors] int64: index of the anchor's document's first token in the packed context."""
    positions: Tensor
    """[anchors] int64: the anchor's position inside its document; it sees positions before it."""
    block_size: int
    context_length: int
    """Tokens in the packed context."""

    @property
    def num_anchors(self) -> int:
        return self.positions.shape[0]

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Runs of neighboring anchors of one document, each with the context slice that it needs."""
        starts, positions = self.doc_starts.tolist(), self.positions.tolist()
        most = max(1, _CHUNK_QUERIES // self.block_size)
        chunks, first = [], 0
        for index in range(1, len(starts) + 1):
            ended = index == len(starts) or starts[index] != starts[first] or index - first == most
            if ended:
                chunks.append(Chunk(first, index, starts[first], starts[first] + positions[index - 1]))
                first = index
        return tuple(chunks)


@dataclass(frozen=True)
class Chunk:
    """Anchors first..last-1, all of one document, and the context slice low..high-1 they may see."""

    first: int
    last: int
    low: int
    high: int


def visible(
    layout: AnchorLayout,
    query: Tensor,
    key: Tensor,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """The mask's one definition: whether `query` may see `key` (broadcast against each other).

    `query` indexes anchors x block; `key` indexes the packed context followed by anchors x block.
    """
    size, context = layout.block_size, layout.context_length
    anchor, slot = query // size, query % size
    position = layout.positions[anchor]
    query_position = position + slot
    start = layout.doc_starts[anchor]
    key_in_document = key - start
    in_context = (key < context) & (key_in_document >= 0) & (key_in_document < position)
    in_block = (key >= context) & ((key - context) // size == anchor)
    key_position = torch.where(key < context, key_in_document, position + (key - context) % size)
    seen = in_context | in_block
    if causal:
        seen = seen & (key_position <= query_position)
    if window is not None:
        seen = seen & (query_position - key_position < window)
        if not causal:
            seen = seen & (key_position - query_position < window)
    return seen


def dense_mask(layout: AnchorLayout, *, causal: bool, window: int | None) -> Tensor:
    """[anchors x block, context + anchors x block] bool: the slow reference."""
    queries = layout.num_anchors * layout.block_size
    device = layout.positions.device
    query = torch.arange(queries, device=device)[:, None]
    key = torch.arange(layout.context_length + queries, device=device)[None, :]
    return visible(layout, query, key, causal=causal, window=window)


def anchored_attention(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    layout: AnchorLayout,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Attention of every anchor's block over its own past and itself.

    q [heads, anchors x block, dim]; k/v_context [kv heads, context, dim];
    k/v_block [kv heads, anchors x block, dim]. Returns [heads, anchors x block, dim].
    """
    if q.is_cuda:
        return _flex(q, k_context, v_context, k_block, v_block, layout, causal=causal, window=window)
    outputs = []
    size = layout.block_size
    for chunk, mask in zip(layout.chunks, _chunk_masks(layout, causal, window), strict=True):
        rows = slice(chunk.first * size, chunk.last * size)
        columns = slice(chunk.low, chunk.high)
        keys = torch.cat([k_context[:, columns], k_block[:, rows]], dim=1)
        values = torch.cat([v_context[:, columns], v_block[:, rows]], dim=1)
        outputs.append(_sdpa(q[:, rows], keys, values, mask))
    return torch.cat(outputs, dim=1)


def _chunk_masks(layout: AnchorLayout, causal: bool, window: int | None) -> list[Tensor]:
    """Each chunk's mask; computed once per batch and kind of layer, kept with the layout."""
    kept: dict[tuple[bool, int | None], list[Tensor]] = layout.__dict__.setdefault("_masks", {})
    if (causal, window) not in kept:
        kept[causal, window] = [_chunk_mask(layout, c, causal, window) for c in layout.chunks]
    return kept[causal, window]


def _chunk_mask(layout: AnchorLayout, chunk: Chunk, causal: bool, window: int | None) -> Tensor:
    """Additive mask [chunk queries, chunk context + chunk queries] (0 or -inf)."""
    size = layout.block_size
    query = torch.arange(chunk.first * size, chunk.last * size)
    key = torch.cat([torch.arange(chunk.low, chunk.high), query + layout.context_length])
    seen = visible(layout, query[:, None], key[None, :], causal=causal, window=window)
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))


def block_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Attention of one block over its past and itself, as decoding does it.

    q [heads, block, dim]; k and v [kv heads, context + block, dim], the block's own keys last, so
    that a key's index is its distance from the start of the context.
    """
    mask = None
    if causal or window is not None:
        key_position = torch.arange(k.shape[1], device=k.device)
        query_position = key_position[-q.shape[1] :, None]
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=k.device)
        if causal:
            seen &= key_position <= query_position
        if window is not None:
            seen &= query_position - key_position < window
            seen &= key_position - query_position < window
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=k.device).masked_fill_(~seen, float("-inf"))
    return _sdpa(q, k, v, mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    mask = None if mask is None else mask.to(q.dtype)
    grouped = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=grouped)[0]


def _flex(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    layout: AnchorLayout,
    *,
    causal: bool,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    keys, values = torch.cat([k_context, k_block], dim=1), torch.cat([v_context, v_block], dim=1)
    masks = layout.__dict__.setdefault("_block_masks", {})
    if (causal, window) not in masks:
        masks[causal, window] = _block_mask(layout, causal=causal, window=window)
    eager = cast("Callable[..., Tensor]", flex_attention)
    attend = _compiled(eager) if q.is_cuda else eager
    grouped = q.shape[0] != keys.shape[0]
    return attend(q[None], keys[None], values[None], block_mask=masks[causal, window], enable_gqa=grouped)[0]


def _block_mask(layout: AnchorLayout, *, causal: bool, window: int | None) -> BlockMask:
    """The mask for flex attention, its tiles found from the layout.

    torch's `create_block_mask` would evaluate the mask at every entry: tens of GB at the paper's sizes.
    """
    from torch.nn.attention.flex_attention import BlockMask

    # A tensor, as everything else that differs from batch to batch: a number would be a constant at first.
    context = torch.tensor(layout.context_length, device=layout.positions.device)
    traced = replace(layout, context_length=cast("int", context))

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return visible(traced, query, key, causal=causal, window=window)

    tiles = visible_tiles(layout, window=window)
    queries = layout.num_anchors * layout.block_size
    return BlockMask.from_kv_blocks(
        tiles.sum(dim=-1, dtype=torch.int32)[None, None],
        tiles.argsort(dim=-1, descending=True, stable=True).to(torch.int32)[None, None],
        BLOCK_SIZE=_TILE,
        mask_mod=mask_mod,
        seq_lengths=(queries, layout.context_length + queries),
    )


def visible_tiles(layout: AnchorLayout, *, window: int | None) -> Tensor:
    """[query tiles, key tiles] int: not 0 where a tile of the mask may have something to see."""
    size, device = layout.block_size, layout.positions.device
    index = torch.arange(layout.num_anchors, device=device)
    num_queries = layout.num_anchors * size
    edges = torch.arange(0, layout.context_length + num_queries, _TILE, device=device)

    def touched(low: Tensor, high: Tensor) -> Tensor:
        """[anchors, key tiles]: whether keys low..high-1 reach into a tile."""
        low, high = low[:, None], high[:, None]
        return (edges < high) & (edges + _TILE > low) & (low < high)

    seen_from = 0 if window is None else (layout.positions - window + 1).clamp_min(0)
    own = layout.context_length + index * size
    by_anchor = touched(layout.doc_starts + seen_from, layout.doc_starts + layout.positions)
    by_anchor = (by_anchor | touched(own, own + size)).int()
    tiles = torch.zeros(-(-num_queries // _TILE), len(edges), dtype=torch.int32, device=device)
    first, last = index * size // _TILE, (index * size + size - 1) // _TILE
    for step in range((size - 1) // _TILE + 2):  # a block's queries may lie across tiles
        tiles.index_add_(0, torch.minimum(first + step, last), by_anchor)
    return (tiles > 0).int()


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=True)
