"""The toy's training batches: freshly drawn conversations, labels on the answers only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from dflash_core.toy.question import Style
from dflash_core.toy.texts import conversations

if TYPE_CHECKING:
    from torch import Tensor

BATCH = 8
"""Conversations in a batch."""
IGNORED = -100
_POOL = 32
"""Batches drawn at once and sorted by length, so that little is padding."""


def batches(tokenizer: Any, style: Style, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, labels), both [BATCH, longest] int64; labels are `IGNORED` off the answers.

    Padding is on the right, where a causal model cannot see it, so no mask is needed.
    """
    source, rng = conversations(style, seed), Random(seed)
    while True:
        rows = sorted(_encoded(tokenizer, islice(source, BATCH * _POOL)), key=lambda row: sum(map(len, row)))
        starts = list(range(0, len(rows), BATCH))
        rng.shuffle(starts)
        for start in starts:
            yield _padded(rows[start : start + BATCH], tokenizer.pad_token_id)


def _encoded(tokenizer: Any, texts: Iterator[tuple[str, str, str]]) -> Iterator[tuple[list[int], list[int]]]:
    """Per conversation the ids up to the answer, and those of the answer with the token that ends it."""
    heads, tails = [], []
    for _, prompt, answer in texts:
        message = [{"role": "user", "content": prompt}]
        heads.append(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        tails.append(answer + tokenizer.eos_token)
    return zip(tokenizer(heads)["input_ids"], tokenizer(tails)["input_ids"], strict=True)


def _padded(rows: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[Tensor, Tensor]:
    import torch

    longest = max(len(head) + len(tail) for head, tail in rows)
    ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), IGNORED)
    for i, (head, tail) in enumerate(rows):
        end = len(head) + len(tail)
        ids[i, :end] = torch.tensor(head + tail)
        labels[i, len(head) : end] = ids[i, len(head) : end]
    return ids, labels
