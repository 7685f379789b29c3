"""Thinking on and off as domains: a drafter meets two distributions, so they are asked and measured apart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal

from dflash_core.errors import UserError
from dflash_core.types import Checkpoint, Prompt

Thinking = Literal["default", "on", "off", "both"]

_WAYS: dict[str, tuple[bool, ...]] = {"on": (True,), "off": (False,), "both": (True, False)}
_SUFFIX = {True: "thinking", False: "no-thinking"}


def with_thinking(prompts: Iterable[Prompt], thinking: Thinking) -> Iterator[Prompt]:
    """Each prompt as `thinking` asks for it: `both` gives it twice.

    A prompt that says itself whether to think stays as it is. Domains tell which is which
    (`math/thinking`), except where nobody said anything.
    """
    for prompt in prompts:
        own = prompt.thinking is not None
        ways = (prompt.thinking,) if own else _WAYS.get(thinking, (None,))
        for way in ways:
            if way is None:
                yield prompt
                continue
            name = prompt.id if own or thinking != "both" else f"{prompt.id}/{_SUFFIX[way]}"
            yield replace(prompt, id=name, domain=f"{prompt.domain}/{_SUFFIX[way]}", thinking=way)


def check_thinking(checkpoint: Checkpoint, thinking: Thinking) -> None:
    """Raise UserError if thinking is to be switched on a target whose chat template has no switch."""
    if thinking != "default" and "enable_thinking" not in checkpoint.chat_template:
        raise UserError(
            f"the chat template of {checkpoint.path} does not look at enable_thinking, so --generate."
            f"thinking {thinking} would change nothing; leave it at default or pass another --chat-template"
        )
