"""How well draws fit a law: chi-square, and where it becomes suspicious."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square(tokens: Tensor, law: Tensor) -> tuple[float, int]:
    """(statistic, degrees of freedom) of draws against probabilities; rare tokens are one class."""
    counts = torch.bincount(tokens, minlength=len(law)).double()
    expected = law.double() * len(tokens)
    often = expected >= 5
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    return float(statistic), int(used.sum()) - 1


def bound(degrees: int) -> float:
    """The chi-square quantile that one run in about 30,000 exceeds (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4 * math.sqrt(spread)) ** 3
