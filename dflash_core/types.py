"""The values that pass between stages: small, frozen, free of torch.

What is measured is defined here once and used by training, gate, registry and dashboard alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str
    extra: str = ""
    """A JSON object of what else the message has (tool_calls, tool_call_id, name, ...); it may replace
    `content` by null. Keys in the message's own order, which templates show."""


@dataclass(frozen=True)
class Prompt:
    """A conversation to be answered.

    `history` stands before the first answer (a system message, earlier turns); each of `turns`
    is a user message that the model answers in order, its own answers in between. No turn at all
    means that the history itself is to be answered: it ends with a tool's result.
    """

    id: str
    domain: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    tools: str = ""
    """A JSON list of the tools offered to the model; empty where there are none."""
    thinking: bool | None = None
    """What the chat template is told as `enable_thinking`; None: nothing."""

    @property
    def num_answers(self) -> int:
        """How often the model answers."""
        return max(1, len(self.turns))


@dataclass(frozen=True)
class Trace(Prompt):
    """A prompt that a serving engine answered, and the answer as it was logged.

    Its history and turn are what was asked; token ids, where the engine logged them, are what counts.
    """

    answer: str = ""
    """The text; empty where only token ids were logged."""
    answer_ids: tuple[int, ...] = ()
    """Stop token included, where one was reached."""
    prompt_ids: tuple[int, ...] = ()
    stopped: bool = True
    """By a stop token; otherwise cut, at a length or at a string."""
    template: str = ""
    """sha256 of the chat template that rendered the prompt, where it was logged."""
    unusable: str = ""
    """Why its tokens cannot be known, in words."""


def opening(prompt: Prompt) -> list[Message]:
    """The messages of `prompt` before its first answer."""
    return [*prompt.history, *(Message("user", turn) for turn in prompt.turns[:1])]


@dataclass(frozen=True)
class Sample:
    """A conversation rendered as serving renders it, and where in it the target itself spoke.

    Only what the target generated is supervised: each of `spans` is a half-open range [start, end)
    of positions in `input_ids`, stop token included; in order, and never touching one another.
    """

    id: str
    domain: str
    input_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def num_supervised(self) -> int:
        """Tokens that the target generated."""
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class TargetConfig:
    """What we read of a target's `config.json`, bounded and checked by us."""

    model_type: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    """As transformers 5 spells it: `rope_theta`, `rope_type` and the scaling's own keys."""
    tie_word_embeddings: bool
    torch_dtype: str
    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Checkpoint:
    """A target directory that has been validated; nothing is loaded yet."""

    path: Path
    config: TargetConfig
    fingerprint: str
    """sha256 over weights, config and tokenizer; independent of path and of sharding."""
    family: str
    """The registered model's default name: what stays the same between checkpoints of a model."""
    num_parameters: int
    chat_template: str = field(repr=False)
    eos_ids: tuple[int, ...]
    """Every id that ends a response: config, generation config and tokenizer together."""
    pad_id: int | None
    bos_id: int | None
    num_tokenizer_ids: int
    """Highest tokenizer id + 1; rows of the embedding from here on are padding."""


@dataclass(frozen=True)
class PromptResult:
    """Draft-verify decoding of one prompt (all its turns together).

    `accepted[r]` is the number of draft tokens of round r that were accepted *and emitted*;
    `emitted[r]` adds the bonus token, cut at the stop token or the length limit, so that
    sum(emitted) / len(emitted) is τ. The token that prefill yields is in no round.
    """

    id: str
    domain: str
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    num_response_tokens: int
    """All response tokens, those that prefill yielded included."""
    seconds: float
    lossless: bool | None
    """Equal to the target's own greedy decoding; None when it was not compared."""

    @property
    def num_rounds(self) -> int:
        return len(self.emitted)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by verify rounds."""
        return sum(self.emitted)


@dataclass(frozen=True)
class AcceptanceReport:
    """Acceptance of one drafter on one target over a set of prompts."""

    block_size: int
    prompts: tuple[PromptResult, ...]
    drafter_fingerprint: str
    target_fingerprint: str
    temperature: float
    max_new_tokens: int

    @property
    def tokens(self) -> int:
        return sum(p.num_tokens for p in self.prompts)

    @property
    def rounds(self) -> int:
        return sum(p.num_rounds for p in self.prompts)


class Verdict(StrEnum):
    """What one check, or the gate as a whole, says."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Interval:
    """A point estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class GateCheck:
    """One question the gate asked, in words and numbers."""

    name: str
    verdict: Verdict
    measured: str
    required: str
    explanation: str
    interval: Interval | None = None
    """What was measured, where it is a number: the verdict says how it lies to `threshold`."""
    threshold: float | None = None


@dataclass(frozen=True)
class GateDecision:
    """The gate's answer and everything it rests on."""

    verdict: Verdict
    checks: tuple[GateCheck, ...]
    tau_candidate: Interval
    tau_champion: Interval | None
    ratio: Interval | None
    """τ of the candidate / τ of the champion, paired over prompts."""
    num_prompts: int
    confidence: float = 0.95
    """Of every interval here."""


class Outcome(StrEnum):
    """How a realignment ended."""

    PROMOTED = "promoted"
    CERTIFIED = "certified"
    REJECTED = "rejected"
    HELD = "held"
