"""Acceptance of a drafter on a target: decode prompts for real, and prove the output lossless.

Losslessness under greedy decoding is checked independently of the decode loop: one plain forward of
the target over prompt and response must choose every emitted token itself. Two orders of summation
may disagree where two tokens are tied up to rounding, and only there (`tie_margin`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflash_core.corpus.samples import answer_text, check_length, render
from dflash_core.decoding.speculate import Decoded, speculate
from dflash_core.models.drafter import Drafter
from dflash_core.models.target import Target
from dflash_core.types import Message, Prompt, PromptResult, opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DecodeSettings:
    """How prompts are decoded."""

    max_new_tokens: int
    temperature: float
    stop_ids: tuple[int, ...]
    max_positions: int
    """The target's context length."""
    seed: int = 0


def evaluate_prompt(
    target: Target,
    drafter: Drafter | None,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    settings: DecodeSettings,
) -> PromptResult:
    """Decode every turn of `prompt`, each after the model's own earlier answers."""
    messages = opening(prompt)
    accepted: list[int] = []
    emitted: list[int] = []
    tokens, seconds = 0, 0.0
    lossless: bool | None = None if settings.temperature > 0 else True
    for turn in range(prompt.num_answers):
        if turn:
            messages.append(Message("user", prompt.turns[turn]))
        ids = render(tokenizer, messages, tools=prompt.tools, thinking=prompt.thinking, name=prompt.id)
        check_length(prompt.id, len(ids), settings.max_new_tokens, settings.max_positions)
        decoded = decode(target, drafter, ids, settings)
        if lossless:
            lossless = is_greedy(target, ids, decoded.response_ids)
        accepted += decoded.accepted
        emitted += decoded.emitted
        tokens += len(decoded.response_ids)
        seconds += decoded.seconds
        messages.append(Message("assistant", answer_text(tokenizer, decoded.response_ids)))
    return PromptResult(prompt.id, prompt.domain, tuple(accepted), tuple(emitted), tokens, seconds, lossless)


def decode(
    target: Target, drafter: Drafter | None, prompt_ids: list[int], settings: DecodeSettings
) -> Decoded:
    """`speculate` with these settings."""
    return speculate(
        target,
        drafter,
        prompt_ids,
        max_new_tokens=settings.max_new_tokens,
        stop_ids=settings.stop_ids,
        temperature=settings.temperature,
        seed=settings.seed,
    )


def tie_margin(dtype: torch.dtype) -> float:
    """How far below the best logit an emitted token may lie and still be a tie up to rounding.

    Logits of these models are of the order of 2^5: one unit in the last place is then 2^-2 in
    bfloat16 (8 bits of mantissa), and fp32's rounding, summed over a forward, stays below 1e-3.
    """
    return 1e-3 if dtype == torch.float32 else 0.5


@torch.inference_mode()
def is_greedy(target: Target, prompt_ids: list[int], response_ids: tuple[int, ...]) -> bool:
    """Whether the target itself, in one plain forward, chooses every token of the response."""
    ids = torch.tensor([[*prompt_ids, *response_ids]], device=target.device)
    kept = len(response_ids) + 1
    logits = target.forward(ids, logits_to_keep=kept).logits
    logits = logits[0, :-1].float()
    chosen = logits.gather(1, ids[0, len(prompt_ids) :, None])[:, 0]
    return bool((logits.max(dim=-1).values - chosen <= tie_margin(target.dtype)).all())
