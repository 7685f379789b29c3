"""Answers that never end: the same few tokens over and over, until the length limit.

A drafter accepts nearly everything of them, so they flatter τ, and training on them teaches little else.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 64
FEWEST_TOKENS = 32
FEWEST_IN_ALL = 16
"""Of a shorter answer that is nothing else."""
FEWEST_ROUNDS = 4


def repeats_endlessly(ids: Sequence[int]) -> bool:
    """Whether token ids end in one passage of at most 64 tokens repeated without a change.

    Four rounds of it at least, and 32 tokens at least: shorter repetitions stand in honest answers (a rule
    of dashes, a table), unless an answer of 16 tokens and more is nothing else. Meant for answers that no
    stop token ended; one that was ended has an end.
    """
    fewest = max(FEWEST_IN_ALL, min(FEWEST_TOKENS, len(ids)))
    for period in range(1, min(LONGEST_PERIOD, len(ids) // FEWEST_ROUNDS) + 1):
        length = max(fewest, FEWEST_ROUNDS * period)
        if length <= len(ids):
            tail = list(ids[-length:])
            if tail[period:] == tail[:-period]:
                return True
    return False
