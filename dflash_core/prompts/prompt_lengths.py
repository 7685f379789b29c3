"""Does every prompt leave room for its answers in the target's context; without tokenizing most of them.

A token stands for one byte of rendered text at least, so a text with no more bytes than there is room fits
for sure. Only the others are tokenized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dflash_core.corpus.samples import check_length, check_tools, render, render_text
from dflash_core.errors import UserError
from dflash_core.types import Message, Prompt, opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_SHARE_TOO_LONG = 0.05
"""So many may be left out unasked; of more the user should know before anything is spent."""
NUM_NAMED = 3
"""So many prompts are named that are too long."""
_EXPANSION = 18
"""Code points that one becomes at most under any of Unicode's normal forms."""


class FittingPrompts:
    """Lets the prompts through that fit, and counts the others."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        max_positions: int,
        *,
        any_share: bool,
        served: bool = False,
    ) -> None:
        """any_share: leave out as many as need be, since nobody chose these prompts for this target.

        served: the prompts were logged as served, so that a template may pass their tools over.
        """
        self._tokenizer, self._new, self._positions = tokenizer, max_new_tokens, max_positions
        backend = getattr(tokenizer, "backend_tokenizer", None)
        plain = backend is not None and backend.normalizer is None
        self._tokens_per_byte = 1 if plain else _EXPANSION
        self._any_share = any_share
        self._tools_seen = served
        self.num_kept = self.num_too_long = 0
        self.too_long: list[str] = []
        """The ids of the first few."""
        self._first: UserError | None = None

    def of(self, prompts: Iterable[Prompt], advance: Callable[[int], None]) -> Iterator[Prompt]:
        """Those of `prompts` that fit.

        Raises UserError if the template cannot render one, or passes over the tools of the first with tools.
        """
        for prompt in prompts:
            try:
                self._check(prompt)
            except _TooLongError as error:
                self.num_too_long += 1
                if len(self.too_long) < NUM_NAMED:
                    self.too_long.append(prompt.id)
                self._first = self._first or error
            else:
                self.num_kept += 1
                yield prompt
            advance(1)

    def conclude(self) -> None:
        """Raise UserError if too many did not fit."""
        if self._first is None:
            return
        total = self.num_kept + self.num_too_long
        few = self._any_share or self.num_too_long <= MAX_SHARE_TOO_LONG * total
        if self.num_kept and few:
            return
        named = ", ".join(map(repr, self.too_long))
        more = f"{self.num_too_long:,} of {total:,} prompts are too long, such as {named}: "
        if self.num_too_long == 1:
            more = ""
        raise UserError(f"{more}{self._first}")

    def _check(self, prompt: Prompt) -> None:
        messages = all_questions(prompt)
        room = self._new * prompt.num_answers
        if prompt.tools and not self._tools_seen:
            check_tools(self._tokenizer, [prompt])
            self._tools_seen = True
        told: dict[str, Any] = {"tools": prompt.tools, "thinking": prompt.thinking, "name": prompt.id}
        text = render_text(self._tokenizer, messages, **told)
        if len(text.encode()) * self._tokens_per_byte + room <= self._positions:
            return
        ids = render(self._tokenizer, messages, **told)
        try:
            check_length(prompt.id, len(ids), room, self._positions)
        except UserError as error:
            raise _TooLongError(str(error)) from None


class _TooLongError(UserError):
    """This prompt does not fit."""


def all_questions(prompt: Prompt) -> list[Message]:
    """The conversation with empty answers: what its last turn is rendered as, but for the answers."""
    later = [Message("user", turn) for turn in prompt.turns[1:]]
    return [*opening(prompt), *(m for turn in later for m in (Message("assistant", ""), turn))]
