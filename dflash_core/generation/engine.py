"""The protocol of generation engines: requests in, answers out as they finish, the same every time.

An engine is given everything that is to be answered and decides itself what is decoded together. More
may be submitted while answers are taken: the next turn of a conversation goes in as soon as the turn
before it has been answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Ending = Literal["stop", "length"]


@dataclass(frozen=True)
class GenerationSettings:
    """How every request of an engine is answered."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: the likeliest tokens that together reach this probability, the last included."""


@dataclass(frozen=True)
class Request:
    """A rendered prompt to be answered."""

    id: str
    """Unique among an engine's requests."""
    prompt_ids: tuple[int, ...]
    seed: int
    """Of this answer's draws, so that they do not depend on what is decoded beside it."""


@dataclass(frozen=True)
class Answer:
    """What the target answered."""

    id: str
    """The request's."""
    token_ids: tuple[int, ...]
    """At most `max_new_tokens`; a stop token only at the end."""
    ending: Ending
    """Whether a stop token ended it or the length limit."""


class Engine(Protocol):
    """Answers requests with a target. Equal requests, submitted alike, get byte-identical answers."""

    @property
    def version(self) -> str:
        """Name and version of what decodes, as it is recorded with the answers."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; their order does not matter."""

    def answers(self) -> Iterator[Answer]:
        """Answers as they finish, until none is left; requests may be submitted in between."""


def request_seed(seed: int, name: str) -> int:
    """A seed in [0, 2^63) for what is called `name`, in a run of that `seed`."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def ending(token_ids: list[int], settings: GenerationSettings) -> Ending | None:
    """How an answer ended with its latest token; None while it goes on."""
    if token_ids[-1] in settings.stop_ids:
        return "stop"
    return "length" if len(token_ids) >= settings.max_new_tokens else None
