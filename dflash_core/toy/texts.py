"""The toy's conversations: three domains, two styles of answering, a train and a gate split.

Everything is drawn from a seed. A prompt belongs to one split by the hash of its text, so that no
seed can put it into the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

from dflash_core.toy import arithmetic, chat, code
from dflash_core.toy.question import Question, Style
from dflash_core.types import Prompt

Split = Literal["train", "gate"]
DOMAINS: dict[str, Callable[[Random], Question]] = {
    "arithmetic": arithmetic.draw,
    "code": code.draw,
    "chat": chat.draw,
}
_GATE_SHARE = 5
"""One prompt in this many belongs to the gate."""


def conversations(style: Style, seed: int, split: Split = "train") -> Iterator[tuple[str, str, str]]:
    """Endless (domain, prompt, answer), the domains in turn; prompts may repeat."""
    for domain, question in _questions(seed, split):
        yield domain, question.prompt, question.answer(style)


def toy_prompts(count: int, seed: int, split: Split = "train") -> list[Prompt]:
    """`count` different prompts, the domains in turn as far as they go. There are millions.

    The same seed gives the same list, and a longer list begins with a shorter one.
    """
    prompts: dict[str, Prompt] = {}
    for domain, question in _questions(seed, split):
        if len(prompts) == count:
            break
        prompts.setdefault(
            question.prompt, Prompt(f"toy/{split}/{len(prompts):04d}", domain, (question.prompt,))
        )
    return list(prompts.values())


def _questions(seed: int, split: Split) -> Iterator[tuple[str, Question]]:
    rng = Random(f"{seed}/{split}")  # a text seed is hashed, the same on every machine
    while True:
        for domain, draw in DOMAINS.items():
            question = draw(rng)
            while split_of(question.prompt) != split:
                question = draw(rng)
            yield domain, question


def split_of(prompt: str) -> Split:
    """The split that a prompt's text belongs to."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "gate" if int.from_bytes(digest[:4], "big") % _GATE_SHARE == 0 else "train"
