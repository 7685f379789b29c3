"""Logged answers as samples: the tokens that the target was served with, and where it spoke, found exactly.

The prompt is rendered with the answer's turn opened, the answer's ids follow: those that were logged, or its
text encoded and a stop token. So where the answer stands is known by its index and nothing is searched for.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, cast

from dflash_core.corpus.repetition import repeats_endlessly
from dflash_core.corpus.samples import render
from dflash_core.corpus.turns import merge_turns
from dflash_core.errors import UserError
from dflash_core.prompts.overlap import conversation_hash
from dflash_core.types import Checkpoint, Sample, Trace, opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\s*")
_FEWEST_COMPARED = 8
MAX_SHARE_MISMATCHED = 0.05
"""Rendered prompts that differ from logged ones, at most: beyond it is not chance but another template."""


def template_sha256(checkpoint: Checkpoint) -> str:
    """Of the text of the target's chat template."""
    return hashlib.sha256(checkpoint.chat_template.encode()).hexdigest()


class TraceRenderer:
    """Makes samples of traces for one target, and counts what it leaves out and why."""

    def __init__(self, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> None:
        self._checkpoint, self._tokenizer = checkpoint, tokenizer
        self._template = template_sha256(checkpoint)
        self._stop = _stop_token(checkpoint, tokenizer)
        self.left_out: Counter[str] = Counter()
        self.num_compared = 0
        """Prompts that were logged both as messages and as ids."""
        self.num_mismatched = 0
        self.first_mismatch = ""
        """Which trace it is and where its ids part from the rendered ones, in words."""

    def samples(self, traces: Iterable[Trace]) -> Iterator[Sample]:
        """The samples of `traces`, turns of one conversation in as few as can be.

        Raises UserError if the traces are of another chat template or vocabulary.
        """
        ordered = sorted(traces, key=lambda trace: (conversation_hash(trace), trace.id))
        for _, turns in groupby(ordered, key=conversation_hash):
            made = [sample for trace in turns if (sample := self._sample(trace)) is not None]
            # Sorted by their ids, what a sample goes on from stands right before it.
            yield from merge_turns(sorted(made, key=lambda sample: sample.input_ids))

    def _sample(self, trace: Trace) -> Sample | None:
        try:
            prompt_ids = self._prompt_ids(trace)
            answer_ids, silent = self._answer_ids(trace)
        except _UnusableError as reason:
            self.left_out[str(reason)] += 1
            return None
        everything = (*prompt_ids, *answer_ids)
        if len(everything) > self._checkpoint.config.max_positions:
            self.left_out["more tokens than the target's context holds"] += 1
            return None
        return Sample(trace.id, trace.domain, everything, ((len(prompt_ids) + silent, len(everything)),))

    def _prompt_ids(self, trace: Trace) -> tuple[int, ...]:
        """As logged; rendered where only messages were."""
        if trace.template and trace.template != self._template:
            raise UserError(
                f"trace {trace.id} was served with the chat template {trace.template[:12]}..., the target "
                f"has {self._template[:12]}...; pass that one as --chat-template, or traces of this target"
            )
        self._check_vocabulary(trace)
        if not (trace.turns or trace.history):
            return trace.prompt_ids
        rendered = tuple(
            render(self._tokenizer, opening(trace), tools=trace.tools, thinking=trace.thinking, name=trace.id)
        )
        if trace.prompt_ids:
            self._compare(trace, rendered)
        return rendered

    def _compare(self, trace: Trace, rendered: tuple[int, ...]) -> None:
        self.num_compared += 1
        if rendered == trace.prompt_ids:
            return
        self.num_mismatched += 1
        self.first_mismatch = self.first_mismatch or _mismatch(trace, rendered)
        if self.num_compared >= _FEWEST_COMPARED:
            check_mismatches(self.num_mismatched, self.num_compared, self.first_mismatch, most=0.5)
        raise _UnusableError("prompt ids that the target's template does not give")

    def _check_vocabulary(self, trace: Trace) -> None:
        highest, size = (
            max((*trace.prompt_ids, *trace.answer_ids), default=0),
            self._checkpoint.config.vocab_size,
        )
        if highest >= size:
            raise UserError(
                f"trace {trace.id} has the token id {highest}, but the target's vocabulary is {size}; "
                "pass traces of this target"
            )

    def _answer_ids(self, trace: Trace) -> tuple[tuple[int, ...], int]:
        """The answer's ids, and how many of them the target did not choose."""
        if trace.unusable:
            raise _UnusableError(trace.unusable)
        ids = list(trace.answer_ids) or self._encoded(trace)
        silent = self._empty_thinking(ids)
        answer = ids[silent:]
        if not answer:
            raise _UnusableError("empty answers")
        if answer[-1] not in self._checkpoint.eos_ids and repeats_endlessly(answer):
            raise _UnusableError("answers that repeat themselves to the end")
        return tuple(ids), silent

    def _encoded(self, trace: Trace) -> list[int]:
        ids = list(self._tokenizer.encode(trace.answer, add_special_tokens=False))
        if self._text(ids) != trace.answer:
            raise _UnusableError("answers whose tokens do not decode back to their text")
        return [*ids, self._stop] if trace.stopped and ids else ids

    def _empty_thinking(self, ids: list[int]) -> int:
        """Tokens of an empty think block at the head: a template or an engine put it there."""
        head = _EMPTY_THINKING.match(self._text(ids[:16]))
        if head is None:
            return 0
        return next(
            (count for count in range(len(ids) + 1) if len(self._text(ids[:count])) >= head.end()), len(ids)
        )

    def _text(self, ids: list[int]) -> str:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast("str", decoded)


def _mismatch(trace: Trace, rendered: tuple[int, ...]) -> str:
    """Where the logged prompt ids first differ from `rendered`, in words."""
    pairs = enumerate(zip_longest(rendered, trace.prompt_ids))
    at, (ours, theirs) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    expected, found = ("the end" if token is None else token for token in (ours, theirs))
    return f"trace {trace.id} at position {at}, expected {expected} and found {found}"


def check_mismatches(
    num_mismatched: int, num_compared: int, first: str, *, most: float = MAX_SHARE_MISMATCHED
) -> None:
    """Raise UserError if more than the share `most` of the prompts were not served as we render them.

    first: the first of them, as `TraceRenderer.first_mismatch` has it.
    """
    if num_mismatched > most * num_compared:
        raise UserError(
            f"{num_mismatched:,} of {num_compared:,} traces were served with other prompt ids than the "
            f"target's chat template gives for their messages (first {first}); "
            "pass the template they had as --chat-template"
        )


class _UnusableError(Exception):
    """This trace is left out; the message says why, the same for all of its kind."""


def _stop_token(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer: the first of the stop tokens that the template itself puts after one."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = list(tokenizer.apply_chat_template(talk[:1], add_generation_prompt=True, return_dict=False))
    whole = list(tokenizer.apply_chat_template(talk, return_dict=False))
    shared = next((i for i, (x, y) in enumerate(zip(asked, whole, strict=False)) if x != y), len(asked))
    after = [token for token in whole[shared:] if token in checkpoint.eos_ids]
    return int(after[0]) if after else checkpoint.eos_ids[0]
