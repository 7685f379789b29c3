"""Several answers of one conversation as one sample, where the later rendering goes on from the earlier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dflash_core.types import Sample


def merge_turns(samples: Iterable[Sample]) -> list[Sample]:
    """`samples`, the answers of one conversation in their order, as few as can be.

    A sample whose ids begin with all the ids of the one before takes that one's spans over: one forward
    then serves both. Where the template renders an earlier answer otherwise than it was generated
    (without its thinking, say, or without its stop token) the two stay apart. A merged sample has the
    id and domain of the first in it.
    """
    merged: list[Sample] = []
    for sample in samples:
        if merged and _extends(sample, merged[-1]):
            first = merged[-1]
            merged[-1] = replace(first, input_ids=sample.input_ids, spans=(*first.spans, *sample.spans))
        else:
            merged.append(sample)
    return merged


def _extends(later: Sample, earlier: Sample) -> bool:
    ids = earlier.input_ids
    # A span that would begin where another ends is no turn of its own.
    return later.input_ids[: len(ids)] == ids and later.spans[0][0] > len(ids)
