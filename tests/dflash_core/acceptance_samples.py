"""Acceptance reports to test with: made of numbers, by hand or by a seeded draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_core.types import AcceptanceReport, PromptResult

BLOCK_SIZE = 8


def prompt(
    name: str,
    accepted: Sequence[int],
    emitted: Sequence[int] | None = None,
    *,
    domain: str = "chat",
    lossless: bool | None = True,
    seconds: float = 0.5,
) -> PromptResult:
    """By default no answer ends inside a round: each emits one token more than it accepted."""
    emitted = [a + 1 for a in accepted] if emitted is None else emitted
    return PromptResult(name, domain, tuple(accepted), tuple(emitted), sum(emitted) + 1, seconds, lossless)


def report(
    *prompts: PromptResult,
    drafter: str = "d" * 64,
    target: str = "a" * 64,
    block_size: int = BLOCK_SIZE,
    temperature: float = 0.0,
    max_new_tokens: int = 64,
) -> AcceptanceReport:
    return AcceptanceReport(block_size, prompts, drafter, target, temperature, max_new_tokens)


def constant(accepted: int, *, num_prompts: int = 12, lossless: bool | None = True) -> AcceptanceReport:
    """Every round of every prompt accepts the same."""
    return report(*(prompt(f"p{i}", [accepted] * (3 + i), lossless=lossless) for i in range(num_prompts)))


def drawn(
    generator: np.random.Generator,
    *,
    num_prompts: int = 24,
    domains: Sequence[str] = ("chat", "code", "math"),
    skill: float = 0.7,
    spread: float = 0.08,
) -> AcceptanceReport:
    """Prompts of differing difficulty: each draft is accepted with a probability drawn for its prompt."""
    return drawn_pair(
        generator, num_prompts=num_prompts, domains=domains, skills=(skill, skill), spread=spread
    )[0]


def drawn_pair(
    generator: np.random.Generator,
    *,
    num_prompts: int,
    skills: tuple[float, float],
    domains: Sequence[str] = ("chat", "code", "math"),
    spread: float = 0.08,
) -> tuple[AcceptanceReport, AcceptanceReport]:
    """Two drafters on the same prompts: what is hard for one is hard for the other."""
    prompts: tuple[list[PromptResult], list[PromptResult]] = ([], [])
    for i in range(num_prompts):
        difficulty = spread * generator.standard_normal()
        for skill, measured in zip(skills, prompts, strict=True):
            share = float(np.clip(skill + difficulty, 0.02, 0.98))
            drafts = generator.geometric(1 - share, size=int(generator.integers(4, 20))) - 1
            accepted = np.minimum(drafts, BLOCK_SIZE - 1).tolist()
            measured.append(prompt(f"p{i:05d}", accepted, domain=domains[i % len(domains)]))
    return report(*prompts[0]), report(*prompts[1])
