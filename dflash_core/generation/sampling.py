"""From logits to tokens: greedy, or a draw by temperature and nucleus, one uniform number per token.

A token is where the draw falls in the cumulative distribution, so that a row's token depends on its own
logits and draw and on nothing beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_CANDIDATES = 256
"""The likeliest tokens that are sorted first: sorting a whole vocabulary costs more than a small model."""


def choose(logits: Tensor, draws: Tensor, temperature: float, top_p: float) -> Tensor:
    """Tokens [rows] from `logits` [rows, vocab]: greedy at temperature 0, else by `draws` [rows]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p >= 1:
        return _where(probabilities, draws)
    likeliest, ids = nucleus(probabilities, top_p)
    return ids.gather(1, _where(likeliest, draws)[:, None])[:, 0]


def nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """(probabilities, ids), each [rows, candidates]: the likeliest first, 0 outside of the nucleus.

    The nucleus is the smallest set of likeliest tokens that reaches `top_p`, as in vLLM and transformers
    (arXiv 1904.09751): the token that crosses the line is in it.
    """
    vocab = probabilities.shape[-1]
    count = min(FIRST_CANDIDATES, vocab)
    while True:
        likeliest, ids = probabilities.topk(count)
        before = likeliest.cumsum(-1, dtype=torch.float64) - likeliest
        inside = before < top_p
        if count == vocab or not bool(inside[:, -1].any()):
            return likeliest * inside, ids
        count = min(count * 16, vocab)


def _where(weights: Tensor, draws: Tensor) -> Tensor:
    """The index [rows] at which the running sum of `weights` [rows, n] passes that share of their sum."""
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    # A draw next to 1 may round up to the sum itself, which no index passes.
    height = torch.minimum(draws * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, height[:, None], right=True)[:, 0]
