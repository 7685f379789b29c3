"""Draft-verify decoding of one sequence, lossless at any temperature.

Each round the drafter fills a block [anchor, draft, draft, ...] in one pass and the target scores the
whole block in one forward. Greedy: drafts are kept while they equal the target's argmax. Sampled:
speculative rejection sampling (Leviathan et al., arXiv 2211.17192, algorithm 1): draft x ~ q is kept
with probability min(1, p(x)/q(x)), the first one refused is redrawn from max(p - q, 0), so that the
output is distributed exactly as the target's own.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.models.drafter import ContextCache, Drafter
from dflash_core.models.target import Target, crop_cache


@dataclass(frozen=True)
class Decoded:
    """A response and how it came about. `accepted` and `emitted` are as in `types.PromptResult`."""

    response_ids: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    seconds: float
    """Wall time of the rounds; the prefill is not in it."""


class _Sampler:
    """Turns logits into tokens: argmax at temperature 0, else a draw from the tempered softmax."""

    def __init__(self, temperature: float, seed: int, device: torch.device) -> None:
        self.temperature = temperature
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.float() / self.temperature, dim=-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        """One token per row of [rows, vocab] -> [rows]."""
        return torch.multinomial(probabilities, 1, generator=self.generator)[:, 0]

    def pick(self, logits: Tensor) -> Tensor:
        """One token per row of [rows, vocab] -> [rows]."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        return self.draw(self.probabilities(logits))

    def uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator, device=self.generator.device)


@torch.inference_mode()
def speculate(
    target: Target,
    drafter: Drafter | None,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> Decoded:
    """Decode one response of at most `max_new_tokens` tokens, a stop token included.

    Without a drafter this is plain decoding (every round emits one token). Past the drafter's
    `max_position_embeddings` it is not asked any more, since it collapses there: rounds go on plain.
    """
    sampler = _Sampler(temperature, seed, target.device)
    stops = frozenset(stop_ids)
    cache = target.new_cache()
    taps = drafter.config.target_layer_ids if drafter else ()
    prompt = torch.tensor([prompt_ids], device=target.device)
    output = target.forward(prompt, layer_ids=taps, cache=cache, logits_to_keep=1)
    response = [int(sampler.pick(output.logits[0])[0])]
    proposer = _Proposer(target, drafter, sampler) if drafter else None
    fresh = len(prompt_ids)  # tokens of the last forward that were kept: their features are new
    accepted_counts, emitted_counts = [], []
    began = time.perf_counter()
    while len(response) < max_new_tokens and response[-1] not in stops:
        room = max_new_tokens - len(response)
        drafts, draft_probabilities = None, None
        if proposer is not None:
            drafts, draft_probabilities = proposer.propose(response[-1], output.features[0, :fresh], room)
        length = len(prompt_ids) + len(response) - 1
        block = torch.tensor([[response[-1]]], device=target.device)
        if drafts is not None:
            block = torch.cat([block, drafts[None]], dim=1)
        output = target.forward(block, layer_ids=taps, cache=cache)
        accepted, bonus = _verify(output.logits[0], drafts, draft_probabilities, sampler)
        tokens = [*block[0, 1 : accepted + 1].tolist(), bonus][:room]
        stop_at = next((i for i, token in enumerate(tokens) if token in stops), None)
        if stop_at is not None:
            tokens = tokens[: stop_at + 1]
        response += tokens
        emitted_counts.append(len(tokens))
        accepted_counts.append(min(accepted, len(tokens)))
        crop_cache(cache, length + len(tokens))
        fresh = len(tokens)
    seconds = time.perf_counter() - began
    return Decoded(tuple(response), tuple(accepted_counts), tuple(emitted_counts), seconds)


class _Proposer:
    """The drafter with the context that it has read so far."""

    def __init__(self, target: Target, drafter: Drafter, sampler: _Sampler) -> None:
        self.target, self.drafter, self.sampler = target, drafter, sampler
        self.cache = ContextCache()
        self.exhausted = False

    def propose(self, anchor: int, features: Tensor, room: int) -> tuple[Tensor | None, Tensor | None]:
        """Drafts [k] and, when sampling, their distributions [k, vocab].

        `features` [new tokens, taps x hidden] are those of the tokens before `anchor` not seen yet;
        k <= min(block size - 1, room): a draft past the length limit would be thrown away.
        """
        config = self.drafter.config
        size = min(config.block_size, room + 1)
        # For good: the features of a round without drafts are never read, so the context has a hole.
        self.exhausted |= self.cache.length + features.shape[0] + size > config.max_positions
        if self.exhausted:
            return None, None
        ids = torch.full((size,), config.mask_token_id, device=features.device)
        ids[0] = anchor
        block = F.embedding(ids, self.target.embedding_weight).to(self.drafter.norm.weight.dtype)
        hidden = self.drafter.draft_block(block, features.to(block.dtype), self.cache)[1:]
        logits = F.linear(hidden.to(self.target.dtype), self.target.head_weight)
        if self.sampler.temperature == 0:
            return logits.argmax(dim=-1), None
        probabilities = self.sampler.probabilities(logits)
        return self.sampler.draw(probabilities), probabilities


def _verify(
    logits: Tensor, drafts: Tensor | None, draft_probabilities: Tensor | None, sampler: _Sampler
) -> tuple[int, int]:
    """(accepted drafts, bonus token) from the target's logits [1 + drafts, vocab] over the block."""
    if drafts is None:
        return 0, int(sampler.pick(logits)[0])
    if draft_probabilities is None:
        chosen = logits.argmax(dim=-1)
        accepted = int((drafts == chosen[:-1]).long().cumprod(0).sum())
        return accepted, int(chosen[accepted])
    probabilities = sampler.probabilities(logits)
    return reject(drafts, draft_probabilities, probabilities, sampler)


def reject(drafts: Tensor, q: Tensor, p: Tensor, sampler: _Sampler) -> tuple[int, int]:
    """Speculative rejection sampling: drafts [k] ~ q [k, vocab] against p [k + 1, vocab]."""
    rows = torch.arange(drafts.shape[0], device=drafts.device)
    kept = sampler.uniform(drafts.shape[0]) * q[rows, drafts] < p[rows, drafts]
    accepted = int(kept.long().cumprod(0).sum())
    if accepted == drafts.shape[0]:
        return accepted, int(sampler.draw(p[accepted][None])[0])
    residual = (p[accepted] - q[accepted]).clamp_min(0)
    # p == q to the last bit leaves nothing to draw from, and then nothing was refused but for rounding.
    weights = residual if residual.sum() > 0 else p[accepted]
    return accepted, int(sampler.draw(weights[None])[0])
