"""What every domain of the toy's texts draws: a prompt and its answer in each style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Style = Literal["plain", "changed"]
STYLES: tuple[Style, ...] = get_args(Style)


@dataclass(frozen=True)
class Question:
    """One prompt; `plain` and `changed` answer it with as few words in common as the facts allow."""

    prompt: str
    plain: str
    changed: str

    def answer(self, style: Style) -> str:
        return self.plain if style == "plain" else self.changed
