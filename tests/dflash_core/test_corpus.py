"""Generated answers are the target's own, whatever generation defaults its checkpoint carries."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from dflash_core.corpus import generate_batch
from dflash_core.speculate import speculate
from dflash_core.target import Target
from tests.dflash_core.small_models import random_prompt, random_target


def _with_defaults(**defaults: object) -> Target:
    model = random_target(seed=4).model
    model.generation_config = GenerationConfig(**defaults)
    return Target(model)


def test_a_batch_of_greedy_answers_is_plain_decoding_despite_penalties() -> None:
    target = _with_defaults(repetition_penalty=5.0, no_repeat_ngram_size=2)
    prompts = [random_prompt(length, seed=length) for length in (3, 9, 14)]
    answers = generate_batch(target, prompts, max_new_tokens=24, stop_ids=(), temperature=0.0, seed=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        plain = speculate(target, None, prompt, max_new_tokens=24, stop_ids=())
        assert answer == list(plain.response_ids)


def test_sampling_is_not_cut_to_the_likeliest_tokens() -> None:
    target = _with_defaults(top_k=1, do_sample=True)
    prompts = [random_prompt(6, seed=1)] * 64
    answers = generate_batch(target, prompts, max_new_tokens=1, stop_ids=(), temperature=5.0, seed=0)
    likeliest = target.forward(torch.tensor(prompts[:1])).logits[0, -1].topk(50).indices.tolist()
    # At this temperature the law is nearly flat over 97 tokens: some draw lies past the first fifty.
    assert {a[0] for a in answers} - set(likeliest)
