"""No two prompts with one id, checked with 8 bytes a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import shown
from dflash_core.types import Prompt


def id_hash(prompt: Prompt) -> int:
    """64 bits of its id; the same only within a process."""
    return hash(prompt.id) & 0xFFFF_FFFF_FFFF_FFFF


def repeats(hashes: npt.NDArray[np.uint64]) -> set[int]:
    """What is in `hashes` more than once. Sorts in place."""
    hashes.sort()
    return {int(value) for value in hashes[1:][hashes[1:] == hashes[:-1]]}


def check_ids(hashes: array[int], again: Callable[[], Iterable[Prompt]], name: str) -> None:
    """Raise UserError if two prompts have one id, of one source or of two.

    hashes: the `id_hash` of each, type code Q; `again` gives the prompts once more, to name one.
    """
    repeated = repeats(np.array(hashes, dtype=np.uint64))
    seen: set[str] = set()
    for prompt in again() if repeated else ():
        if prompt.id in seen:
            raise UserError(
                f"two of the prompts of {name} have the id {shown(prompt.id)}; rename one of them, "
                "or number all of them with ?id="
            )
        if id_hash(prompt) in repeated:
            seen.add(prompt.id)
