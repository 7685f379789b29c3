"""How many prompts each source gives: in proportion to its weight, and never more than it has."""

from __future__ import annotations

from collections.abc import Sequence


def quotas(
    sizes: Sequence[int], weights: Sequence[float | None], total: int | None, *, keep_shares: bool = False
) -> list[int]:
    """Prompts to draw from each source; never more than its size.

    Without weights every prompt is as likely: sources give in proportion to their sizes, or all they have.
    With weights (1 where a source has none) they give `total` in those proportions, and what one cannot
    fill goes to the others. keep_shares: rather fewer than `total` than other proportions; without a
    total that is so in any case.
    """
    if all(weight is None for weight in weights):
        if total is None or total >= sum(sizes):
            return list(sizes)
        return _shared(total, [float(size) for size in sizes], sizes)
    shares = [1.0 if weight is None else weight for weight in weights]
    scale = min(size / share for size, share in zip(sizes, shares, strict=True))
    largest = [min(size, int(scale * share + 1e-9)) for size, share in zip(sizes, shares, strict=True)]
    if total is None or (keep_shares and total >= sum(largest)):
        return largest
    return _shared(total, shares, sizes)


def _shared(total: int, shares: Sequence[float], sizes: Sequence[int]) -> list[int]:
    """`total` in proportion to `shares`, as near as whole numbers come and sizes allow."""
    given = [0] * len(sizes)
    left = min(total, sum(sizes))
    while left:
        free = [i for i, size in enumerate(sizes) if given[i] < size]
        whole = sum(shares[i] for i in free)
        wanted = {i: left * shares[i] / whole for i in free}
        for i in free:
            given[i] += min(int(wanted[i]), sizes[i] - given[i])
        rest = min(total, sum(sizes)) - sum(given)
        if rest == left or all(wanted[i] < sizes[i] for i in free):
            # Nothing but fractions is left: one each, the largest fraction first.
            for i in sorted(free, key=lambda i: (int(wanted[i]) - wanted[i], i)):
                if rest and given[i] < sizes[i]:
                    given[i] += 1
                    rest -= 1
        left = rest
    return given
