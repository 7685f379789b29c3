"""Tokens are drawn from the exact law: the tempered softmax, cut to the nucleus as other engines cut it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from dflash_core.generation import sampling
from dflash_core.generation.sampling import choose, nucleus
from tests.dflash_core.fit import bound, chi_square


def _transformers_law(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    warped = TemperatureLogitsWarper(temperature)(ids, logits) if temperature != 1 else logits
    return torch.softmax(TopPLogitsWarper(top_p)(ids, warped), dim=-1)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("vocab", [50, 3000])
def test_the_nucleus_is_the_one_of_transformers(top_p: float, vocab: int) -> None:
    """Flat rows reach past the first candidates, steep ones end with the first token."""
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(0))
    logits *= torch.logspace(-2, 1.3, 16)[:, None]
    kept, ids = nucleus(torch.softmax(logits, dim=-1), top_p)
    law = torch.zeros_like(logits).scatter(1, ids, kept)
    torch.testing.assert_close(law / law.sum(-1, keepdim=True), _transformers_law(logits, 1.0, top_p))


def test_the_token_that_crosses_the_line_is_in_the_nucleus() -> None:
    probabilities = torch.tensor([[0.125, 0.5, 0.25, 0.125]])
    for top_p, size in ((0.3, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1 - 1e-9, 4)):
        kept, _ = nucleus(probabilities, top_p)
        assert int((kept > 0).sum()) == size, top_p


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (0.7, 0.95)])
def test_draws_follow_the_law(temperature: float, top_p: float) -> None:
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(3)) * 2
    draws = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens = choose(logits.expand(len(draws), -1), draws, temperature, top_p)
    law = _transformers_law(logits, temperature, top_p)[0]
    statistic, degrees = chi_square(tokens, law)
    assert statistic < bound(degrees)
    assert not (law[tokens] == 0).any()
    # The test could fail: a slightly other temperature is told apart.
    statistic, degrees = chi_square(tokens, _transformers_law(logits, temperature * 1.1, top_p)[0])
    assert statistic > bound(degrees)


def test_a_row_does_not_depend_on_its_neighbors() -> None:
    """Also where a neighbor's nucleus needs more candidates than its own."""
    logits = torch.randn(8, 1000, generator=torch.Generator().manual_seed(5)) * 3
    logits[3] = 0.0
    draws = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    together = choose(logits, draws, 0.9, 0.95)
    alone = [int(choose(logits[i : i + 1], draws[i : i + 1], 0.9, 0.95)[0]) for i in range(8)]
    assert together.tolist() == alone


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_ends_of_the_range_fall_on_tokens_that_are_possible(top_p: float) -> None:
    logits = torch.full((2, sampling.FIRST_CANDIDATES * 2), float("-inf"))
    logits[:, 5], logits[:, 9] = 1.0, 1.0
    draws = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert set(choose(logits, draws, 1.0, top_p).tolist()) == {5, 9}


def test_greedy_is_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, -1.0, 1.0]])
    assert choose(logits, torch.empty(0), 0.0, 0.5).tolist() == [1, 0]
