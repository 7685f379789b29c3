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

from dflash_core.prompts.chat_messages import compact
from dflash_core.types import Prompt, Trace, opening

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
    text = unicodedata.normalize("NFKC", " ".join([*asked, *prompt.turns])).casefold()
    return _WORD.findall(text) or text.split()  # a smiley has no word characters


def is_held_out(prompt: Prompt, share: float) -> bool:
    """Whether the prompt belongs to the held-out side; decided by its words alone.

    By those of its first question, if it is a trace: all turns of a conversation stay together.
    """
    text = " ".join(words(first_question(prompt) if isinstance(prompt, Trace) else prompt))
    return _hash(text, _SPLIT_SALT) < share * 2**64


def first_question(prompt: Prompt) -> Prompt:
    """`prompt` up to its first user message: the same for every turn of a conversation."""
    messages = opening(prompt)
    asked = next((i for i, m in enumerate(messages) if m.role == "user"), len(messages) - 1)
    return Prompt(prompt.id, prompt.domain, (), tuple(messages[: asked + 1]), prompt.tools, prompt.thinking)


def content_hash(prompt: Prompt, seed: int) -> int:
    """64 bits of everything that is asked; the seed makes another order of the same prompts.

    Of a trace the upper half is its conversation's, so that a draw of the smallest hashes takes
    conversations whole, and the lower half knows the answer too.
    """
    key = seed.to_bytes(8, "big")
    if not isinstance(prompt, Trace):
        return _hash(_content(prompt), key)
    logged = compact([prompt.answer, prompt.answer_ids, prompt.prompt_ids])
    return conversation_hash(prompt, key) << 32 | _hash(_content(prompt) + logged, key) >> 32


def conversation_hash(trace: Trace, key: bytes = b"") -> int:
    """32 bits of what a conversation begins with; of its ids, where nothing else is known of it."""
    known = trace.turns or trace.history
    return _hash(_content(first_question(trace)) if known else compact(trace.prompt_ids), key) >> 32


def _content(prompt: Prompt) -> str:
    history = [[m.role, " ".join(m.content.split()), m.extra] for m in prompt.history]
    turns = [" ".join(turn.split()) for turn in prompt.turns]
    return compact([history, turns, prompt.tools, prompt.thinking])


def _hash(text: str, key: bytes) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, key=key).digest(), "big")


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
        same = self._texts.get(" ".join(said)) if said else None
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
