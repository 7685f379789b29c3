"""When two prompts are the same question: their words compared, whatever case, punctuation and order of keys.

A prompt's *words* are those of its user messages: casefolded, NFKC, word characters only, a Chinese or
Japanese character a word of its own. Two prompts are *near* when at least `NEAR` of the shorter one's runs
of five words stand in the other: measured on public sets (GSM8K, MATH, MBPP, HumanEval, MT-Bench) it finds
questions that repeat another with a sentence more or less, and leaves apart those that only follow the same
template ("Write a function to find the ... in a given list", other numbers in the same sentence).
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from dflash_core.chat_messages import compact
from dflash_core.types import Prompt

NEAR = 0.7
RUN = 5
"""Words of a run."""
_FEWEST_RUNS = 5
"""With fewer runs a shared phrase is no sign yet: the whole text is compared."""
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
_SPLIT_SALT = b"dflash split 1"
"""Never changes: the split is frozen, and no setting moves a prompt to the other side."""


def words(prompt: Prompt) -> list[str]:
    """The words of the user's messages."""
    asked = [m.content for m in prompt.history if m.role == "user"]
    return _WORD.findall(unicodedata.normalize("NFKC", " ".join([*asked, *prompt.turns])).casefold())


def is_held_out(prompt: Prompt, share: float) -> bool:
    """Whether the prompt belongs to the held-out side; decided by its words alone."""
    text = " ".join(words(prompt)).encode()
    number = int.from_bytes(blake2b(text, digest_size=8, key=_SPLIT_SALT).digest(), "big")
    return number < share * 2**64


def content_hash(prompt: Prompt, seed: int) -> int:
    """64 bits of everything that is asked; the seed makes another order of the same prompts."""
    history = [[m.role, " ".join(m.content.split()), m.extra] for m in prompt.history]
    turns = [" ".join(turn.split()) for turn in prompt.turns]
    text = compact([history, turns, prompt.tools, prompt.thinking]).encode()
    return int.from_bytes(blake2b(text, digest_size=8, key=seed.to_bytes(8, "big")).digest(), "big")


@dataclass(frozen=True)
class Match:
    """A gate prompt that another prompt repeats."""

    gate_id: str
    overlap: float
    """Share of the shorter one's runs that the other has; 1 where all words are the same."""
    exact: bool


class GateIndex:
    """The gate's prompts, to ask of any other prompt whether it repeats one of them."""

    def __init__(self, gate: Iterable[Prompt]) -> None:
        self._texts: dict[str, str] = {}
        self._runs: dict[tuple[str, ...], list[int]] = {}
        self._gate: list[tuple[str, int]] = []
        for prompt in gate:
            said = words(prompt)
            self._texts.setdefault(" ".join(said), prompt.id)
            runs = _runs(said)
            for run in runs:
                self._runs.setdefault(run, []).append(len(self._gate))
            self._gate.append((prompt.id, len(runs)))

    def match(self, prompt: Prompt) -> Match | None:
        """The gate prompt that `prompt` is the same as or nearest to, if it is near."""
        said = words(prompt)
        same = self._texts.get(" ".join(said))
        if same is not None:
            return Match(same, 1.0, exact=True)
        runs = _runs(said)
        shared = Counter(number for run in runs for number in self._runs.get(run, ()))
        best = Match("", 0.0, exact=False)
        for number, count in shared.items():
            gate_id, size = self._gate[number]
            fewest = min(size, len(runs))
            if fewest >= _FEWEST_RUNS and count / fewest > best.overlap:
                best = Match(gate_id, count / fewest, exact=False)
        return best if best.overlap >= NEAR else None


def _runs(said: list[str]) -> set[tuple[str, ...]]:
    return {tuple(said[i : i + RUN]) for i in range(len(said) - RUN + 1)}
