"""Lossless decoding: greedy against transformers' generate, sampling against the exact distribution."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from dflash_core.decoding.evaluation import is_greedy
from dflash_core.decoding.speculate import _Sampler, reject, speculate
from dflash_core.models.drafter import Drafter
from dflash_core.models.target import Target
from tests.dflash_core.small_models import (
    VOCAB,
    drafter_config,
    random_prompt,
    random_target,
    trained_drafter,
)


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Drafter]:
    target = random_target(request.param, seed=5)
    config = drafter_config(target, block_size=8)
    return target, trained_drafter(target, config, tmp_path_factory.mktemp("drafter"))


def _plain(target: Target, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("length", [1, 5, 64])
def test_greedy_equals_transformers_generate(trio: tuple[Target, Drafter], length: int) -> None:
    target, drafter = trio
    prompt = random_prompt(length, seed=length)
    decoded = speculate(target, drafter, prompt, max_new_tokens=40, stop_ids=())
    assert list(decoded.response_ids) == _plain(target, prompt, 40)


def test_every_stop_token_and_every_length_limit_cut_as_plain_decoding_does(
    trio: tuple[Target, Drafter],
) -> None:
    target, drafter = trio
    prompt = random_prompt(8, seed=1)
    plain = _plain(target, prompt, 24)
    for limit in (1, 2, 3, 7, 8, 9, 10, 16, 23):
        decoded = speculate(target, drafter, prompt, max_new_tokens=limit, stop_ids=())
        assert list(decoded.response_ids) == plain[:limit]
        assert 1 + sum(decoded.emitted) == limit
    for stop in sorted(set(plain))[:8]:
        decoded = speculate(target, drafter, prompt, max_new_tokens=24, stop_ids=(stop,))
        assert list(decoded.response_ids) == plain[: plain.index(stop) + 1]
        assert 1 + sum(decoded.emitted) == len(decoded.response_ids)
        assert all(a <= e for a, e in zip(decoded.accepted, decoded.emitted, strict=True))


def test_past_the_drafters_positions_decoding_goes_on_without_drafts(tmp_path: Path) -> None:
    target = random_target(seed=5)
    drafter = trained_drafter(target, drafter_config(target, max_positions=40), tmp_path)
    for length in (20, 39, 40, 41):
        prompt = random_prompt(length, seed=2)
        decoded = speculate(target, drafter, prompt, max_new_tokens=40, stop_ids=())
        assert list(decoded.response_ids) == _plain(target, prompt, 40)
        if length >= 40:
            assert set(decoded.emitted) == {1}


def test_the_greedy_check_catches_a_token_that_the_target_did_not_choose(
    trio: tuple[Target, Drafter],
) -> None:
    target, _ = trio
    prompt = random_prompt(8, seed=4)
    plain = _plain(target, prompt, 12)
    assert is_greedy(target, prompt, tuple(plain))
    for place in range(12):
        forged = list(plain)
        forged[place] = (forged[place] + 1) % 90
        assert not is_greedy(target, prompt, tuple(forged))


def test_rejection_sampling_gives_the_exact_distribution() -> None:
    """Two draft positions over a vocabulary of 5: the empirical law of (first, second) against p's."""
    vocab, draws = 5, 15_000
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, vocab, generator=generator).softmax(-1) ** 3
    p /= p.sum(-1, keepdim=True)
    q = torch.rand(2, vocab, generator=generator) ** 4
    q /= q.sum(-1, keepdim=True)
    sampler = _Sampler(1.0, 1, torch.device("cpu"))
    firsts: Counter[int] = Counter()
    seconds: Counter[int] = Counter()
    for _ in range(draws):
        drafts = sampler.draw(q)
        accepted, bonus = reject(drafts, q, p, sampler)
        emitted = [*drafts[:accepted].tolist(), bonus]
        firsts[emitted[0]] += 1
        if len(emitted) > 1:
            seconds[emitted[1]] += 1
    _assert_multinomial(firsts, p[0])
    # Which second token is drawn does not depend on whether the first was kept: rows of p are independent.
    _assert_multinomial(seconds, p[1])


def _assert_multinomial(counts: Counter[int], p: torch.Tensor) -> None:
    """Pearson's statistic below the 99.9 % point of chi-square with 4 degrees of freedom (18.47)."""
    total = sum(counts.values())
    statistic = sum((counts[i] - total * float(p[i])) ** 2 / (total * float(p[i])) for i in range(len(p)))
    assert statistic < 18.47


def test_sampled_decoding_follows_the_targets_own_distribution(tmp_path: Path) -> None:
    """First two tokens of a response, end to end, against the exact joint of the target."""
    target = random_target(seed=7)
    drafter = trained_drafter(target, drafter_config(target), tmp_path)
    prompt = random_prompt(6, seed=3)
    temperature, draws = 0.5, 600
    counts = Counter(
        speculate(
            target, drafter, prompt, max_new_tokens=2, stop_ids=(), temperature=temperature, seed=seed
        ).response_ids[1]
        for seed in range(draws)
    )
    first = (target.forward(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    rows = torch.tensor([[*prompt, token] for token in range(VOCAB)])
    conditional = (target.forward(rows).logits[:, -1] / temperature).softmax(-1)
    exact = (first[:, None] * conditional).sum(0)
    # Neighboring ids in five bins, each likely enough for Pearson's statistic.
    bins = [list(part) for part in torch.arange(VOCAB).tensor_split(5)]
    grouped = Counter({i: sum(counts[int(t)] for t in part) for i, part in enumerate(bins)})
    _assert_multinomial(grouped, torch.stack([exact[torch.stack(part)].sum() for part in bins]))
