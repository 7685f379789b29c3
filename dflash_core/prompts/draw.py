"""Draw prompts from sources in two passes over them, with 8 bytes of memory a prompt.

The first pass hashes every prompt that may be drawn; the prompts with the smallest hashes are the ones drawn,
each source up to its quota. So the draw from a source hardly changes when the source grows, and no order of
the rows favours any. The second pass gives the drawn prompts out, in the sources' order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import shown
from dflash_core.prompts.mixture import quotas
from dflash_core.prompts.overlap import content_hash
from dflash_core.prompts.prompt_ids import id_hash, repeats
from dflash_core.prompts.sources import Source
from dflash_core.types import Prompt

Hashes = npt.NDArray[np.uint64]
Advance = Callable[[int], None]
_TOLD_EVERY = 512


@dataclass(frozen=True)
class Drawn:
    """What the first pass decided."""

    sources: tuple[Source, ...]
    chosen: tuple[Hashes, ...]
    """Of each source, sorted."""
    sizes: tuple[int, ...]
    """Prompts that each source could give."""
    num_rows: int
    """Prompts read from all sources."""
    num_duplicates: int
    bad: tuple[str, ...]
    """The first few rows that were left out as no prompts, in words."""
    num_bad: int
    seed: int

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(chosen) for chosen in self.chosen)

    def prompts(self, advance: Advance = lambda _count: None) -> Iterator[Prompt]:
        """The second pass."""
        for source, chosen in zip(self.sources, self.chosen, strict=True):
            taken = np.zeros(len(chosen), dtype=bool)
            for prompt in _counted(source.prompts(), advance):
                at = int(np.searchsorted(chosen, np.uint64(content_hash(prompt, self.seed))))
                if at < len(chosen) and not taken[at] and chosen[at] == content_hash(prompt, self.seed):
                    taken[at] = True
                    yield prompt
            if not taken.all():
                raise UserError(
                    f"{source.spec.location} gave {int(taken.sum()):,} prompts when read again where "
                    f"{len(chosen):,} were drawn; run again when it is complete"
                )


def draw(
    sources: Sequence[Source],
    total: int | None,
    *,
    seed: int,
    accept: Callable[[Prompt], bool],
    keep_shares: bool = False,
    advance: Advance = lambda _count: None,
) -> Drawn:
    """The first pass: up to `total` prompts among those that `accept` takes, no content twice.

    keep_shares: as `mixture.quotas` has it.

    Raises UserError for a row that is no prompt, and for an id that a source gives twice.
    """
    hashes: list[Hashes] = []
    bad: list[str] = []
    num_rows = num_bad = 0

    def on_bad(error: UserError) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(bad) < 3:
            bad.append(str(error))

    for source in sources:
        ids, contents = array("Q"), array("Q")
        for prompt in _counted(source.prompts(on_bad), advance):
            num_rows += 1
            ids.append(id_hash(prompt))
            if accept(prompt):
                contents.append(content_hash(prompt, seed))
        _check_ids(source, np.frombuffer(ids, dtype=np.uint64))
        del ids
        hashes.append(np.frombuffer(contents, dtype=np.uint64))
    num_accepted = sum(map(len, hashes))
    unique = _without_repeats(hashes)
    del hashes
    sizes = tuple(map(len, unique))
    wanted = quotas(sizes, [source.spec.weight for source in sources], total, keep_shares=keep_shares)
    return Drawn(
        sources=tuple(sources),
        chosen=tuple(u[:count] for u, count in zip(unique, wanted, strict=True)),
        sizes=sizes,
        num_rows=num_rows,
        num_duplicates=num_accepted - sum(sizes),
        bad=tuple(bad),
        num_bad=num_bad,
        seed=seed,
    )


def _without_repeats(hashes: list[Hashes]) -> list[Hashes]:
    """Each source's hashes, sorted, less those that it or a source before it had already. Sorts in place."""
    unique: list[Hashes] = []
    for found in hashes:
        found.sort()
        fresh = np.ones(len(found), dtype=bool)
        fresh[1:] = found[1:] != found[:-1]
        for earlier in unique:
            if len(earlier):
                at = np.minimum(np.searchsorted(earlier, found), len(earlier) - 1)
                fresh &= earlier[at] != found
        unique.append(found[fresh])
    return unique


def _check_ids(source: Source, ids: Hashes) -> None:
    """Raise UserError if two of the source's prompts have one id. Sorts in place."""
    repeated = repeats(ids)
    if not repeated:
        return
    first: dict[str, int] = {}
    for number, prompt in enumerate(source.prompts(), start=1):
        if id_hash(prompt) not in repeated:
            continue
        if prompt.id in first:
            raise UserError(
                f"{source.spec.location} gives the id {shown(prompt.id)} to its prompts {first[prompt.id]} "
                f"and {number}; rename one of them, or number all of them with ?id="
            )
        first[prompt.id] = number


def _counted(prompts: Iterator[Prompt], advance: Advance) -> Iterator[Prompt]:
    """`prompts`, telling about every few hundred."""
    count = 0
    for count, prompt in enumerate(prompts, start=1):
        yield prompt
        if not count % _TOLD_EVERY:
            advance(_TOLD_EVERY)
    advance(count % _TOLD_EVERY)
