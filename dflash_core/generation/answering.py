"""Prompts answered by a generation engine, turn by turn: what comes out are samples.

Conversations do not wait for each other: the next turn is submitted once the turn before is answered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dflash_core.corpus.repetition import repeats_endlessly
from dflash_core.corpus.samples import answer_text, render
from dflash_core.corpus.turns import merge_turns
from dflash_core.generation.engine import Answer, Engine, Request, request_seed
from dflash_core.types import Message, Prompt, Sample, opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Outcome = Literal["stop", "length", "repetitive"]
"""How an answer ended; one that repeats itself up to the length limit is no sample."""


@dataclass(frozen=True)
class Answered:
    """A prompt with every turn of it answered."""

    index: int
    """Of the prompt, among those that were given."""
    samples: tuple[Sample, ...]
    """Turns of which the later goes on from the earlier are one; see `turns.merge_turns`."""
    outcomes: tuple[Outcome, ...]
    """By turn."""


def answer_prompts(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], seed: int
) -> Iterator[Answered]:
    """Answer `prompts`; each comes as its last turn is finished. Draws depend on `seed` and a prompt's id."""
    asked: dict[str, _Conversation] = {}

    def ask(conversation: _Conversation) -> Request:
        request = conversation.request(tokenizer, seed)
        asked[request.id] = conversation
        return request

    engine.submit([ask(_Conversation(i, prompt, opening(prompt))) for i, prompt in enumerate(prompts)])
    for answer in engine.answers():
        conversation = asked.pop(answer.id)
        conversation.take(answer, tokenizer)
        if conversation.is_over:
            merged = merge_turns(conversation.samples)
            yield Answered(conversation.index, tuple(merged), tuple(conversation.outcomes))
        else:
            engine.submit([ask(conversation)])


@dataclass
class _Conversation:
    """A prompt on its way through its turns."""

    index: int
    prompt: Prompt
    messages: list[Message]
    rendered: list[int] = field(default_factory=list)
    """The turn that is being answered."""
    samples: list[Sample] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.outcomes) == self.prompt.num_answers

    @property
    def name(self) -> str:
        """Of the turn that is being answered."""
        turn = len(self.outcomes) + 1
        return self.prompt.id if turn == 1 else f"{self.prompt.id}#{turn}"

    def request(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> Request:
        prompt = self.prompt
        self.rendered = render(
            tokenizer, self.messages, tools=prompt.tools, thinking=prompt.thinking, name=prompt.id
        )
        # Of several prompts with one id, as different sources may have them, each is its own request.
        place = f"{self.index:06d}.{len(self.outcomes)}"
        return Request(place, tuple(self.rendered), request_seed(seed, self.name))

    def take(self, answer: Answer, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep an answer, and go on to the turn after it."""
        outcome: Outcome = answer.ending
        if answer.ending == "length" and repeats_endlessly(answer.token_ids):
            outcome = "repetitive"
        else:
            ids = (*self.rendered, *answer.token_ids)
            span = (len(self.rendered), len(ids))
            self.samples.append(Sample(self.name, self.prompt.domain, ids, (span,)))
        self.outcomes.append(outcome)
        if not self.is_over:
            said = Message("assistant", answer_text(tokenizer, answer.token_ids))
            self.messages += [said, Message("user", self.prompt.turns[len(self.outcomes)])]
