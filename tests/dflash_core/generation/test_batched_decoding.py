"""The batched engine answers as `transformers` answers each prompt alone, whatever is decoded beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from dflash_core.generation.batched_decoding import PREFILL_TOKENS, BatchedEngine
from dflash_core.generation.engine import Answer, GenerationSettings, Request, request_seed
from dflash_core.generation.row_cache import STEP, RowCache
from dflash_core.models.target import Target
from tests.dflash_core.fit import bound, chi_square
from tests.dflash_core.small_models import VOCAB, random_prompt, random_target, sliding_target

STOPS = frozenset({5, 9, 33})
TARGETS = {
    "qwen3": lambda: random_target("qwen3"),
    "qwen2": lambda: random_target("qwen2"),
    "llama": lambda: random_target("llama"),
    "sliding": lambda: sliding_target(window=5),
}


def _requests(count: int, *, seed: int = 0) -> list[Request]:
    """Prompts of mixed lengths."""
    drawn = random.Random(seed)
    return [Request(f"{i}", tuple(random_prompt(drawn.randint(1, 40), seed=i)), seed=i) for i in range(count)]


def _alone(target: Target, request: Request, max_new_tokens: int, stops: frozenset[int]) -> list[int]:
    """transformers' own greedy answer to one prompt."""
    ids = torch.tensor([request.prompt_ids])
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stops) or None, pad_token_id=0
    )
    output = target.model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
    )
    return output[0, ids.shape[1] :].tolist()


def _answers(
    target: Target, requests: Sequence[Request], settings: GenerationSettings, *, batch_tokens: int = 250
) -> dict[str, Answer]:
    engine = BatchedEngine(target, settings, batch_tokens=batch_tokens)
    engine.submit(requests)
    answers = list(engine.answers())
    assert sorted(a.id for a in answers) == sorted(r.id for r in requests)
    return {answer.id: answer for answer in answers}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("batch_tokens", [1, 250])
def test_greedy_answers_are_those_of_transformers(name: str, batch_tokens: int) -> None:
    """More prompts than there are places for, several stop tokens; and one prompt at a time."""
    target, requests = TARGETS[name](), _requests(24)
    got = _answers(target, requests, GenerationSettings(20, STOPS), batch_tokens=batch_tokens)
    for request in requests:
        assert list(got[request.id].token_ids) == _alone(target, request, 20, STOPS)
    endings = [answer.ending for answer in got.values()]
    assert {"stop", "length"} == set(endings)
    assert all((a.token_ids[-1] in STOPS) == (a.ending == "stop") for a in got.values())


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7])
def test_an_answer_is_never_longer_than_asked_for(max_new_tokens: int) -> None:
    target, requests = random_target(), _requests(9)
    got = _answers(target, requests, GenerationSettings(max_new_tokens, frozenset()))
    for request in requests:
        assert list(got[request.id].token_ids) == _alone(target, request, max_new_tokens, frozenset())


def test_every_stop_token_ends_an_answer_and_is_its_last() -> None:
    """Each token of an answer in turn is made the only stop token."""
    target, (request,) = random_target(seed=3), _requests(1)
    whole = _alone(target, request, 12, frozenset())
    for stop in set(whole):
        answer = _answers(target, [request], GenerationSettings(12, frozenset({stop})))[request.id]
        assert list(answer.token_ids) == whole[: whole.index(stop) + 1]
        assert answer.ending == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_do_not_depend_on_order_or_neighbors(temperature: float) -> None:
    target, requests = random_target(), _requests(17)
    settings = GenerationSettings(15, STOPS, temperature=temperature, top_p=0.9)
    expected = _answers(target, requests, settings)
    random.Random(0).shuffle(requests)
    assert _answers(target, requests, settings) == expected
    assert _answers(target, requests, settings, batch_tokens=130) == expected
    alone = [_answers(target, [request], settings)[request.id] for request in requests]
    assert alone == [expected[request.id] for request in requests]


def test_requests_submitted_meanwhile_are_answered_too() -> None:
    """The next turn of a conversation goes in when the turn before has come out."""
    target, settings = random_target(), GenerationSettings(9, STOPS)
    engine = BatchedEngine(target, settings, batch_tokens=200)
    engine.submit(_requests(8))
    prompts = {request.id: request.prompt_ids for request in _requests(8)}
    turns: dict[str, tuple[int, ...]] = {}
    for answer in engine.answers():
        turns[answer.id] = answer.token_ids
        if "#" not in answer.id:
            prompts[f"{answer.id}#2"] = (*prompts[answer.id], *answer.token_ids, 7)
            engine.submit([Request(f"{answer.id}#2", prompts[f"{answer.id}#2"], seed=0)])
    assert len(turns) == 16
    for name, answer_ids in turns.items():
        request = Request(name, prompts[name], seed=0)
        assert list(answer_ids) == _alone(target, request, 9, STOPS)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 0.8)])
def test_first_tokens_follow_the_targets_law(temperature: float, top_p: float) -> None:
    target, prompt = random_target(), tuple(random_prompt(10, seed=1))
    requests = [Request(f"{i}", prompt, seed=request_seed(7, f"{i}")) for i in range(6000)]
    settings = GenerationSettings(1, frozenset(), temperature=temperature, top_p=top_p)
    answers = _answers(target, requests, settings, batch_tokens=5000)
    tokens = torch.tensor([answer.token_ids[0] for answer in answers.values()])
    law = torch.softmax(target.forward(torch.tensor([prompt])).logits[0, -1].double() / temperature, dim=-1)
    order = law.argsort(descending=True)
    sums = law[order].cumsum(0)
    kept = order[: int((sums < top_p).sum()) + 1]
    law = torch.zeros(VOCAB, dtype=torch.float64).scatter(0, kept, law[kept])
    statistic, degrees = chi_square(tokens, law / law.sum())
    assert statistic < bound(degrees)


def test_a_checkpoints_own_generation_defaults_are_not_applied() -> None:
    """Penalties would be learned by the drafter and never met again in serving."""
    model = random_target(seed=4).model
    model.generation_config = GenerationConfig(repetition_penalty=5.0, top_k=1, do_sample=True)
    target, plain = Target(model), random_target(seed=4)
    settings = GenerationSettings(24, frozenset())
    assert _answers(target, _requests(3), settings) == _answers(plain, _requests(3), settings)


def test_what_is_decoded_together_is_bounded_in_tokens() -> None:
    """The memory too: a few long prompts before many short ones do not make every row long."""
    target = random_target(max_positions=2048)
    widths: list[tuple[int, int]] = []
    rooms: list[tuple[int, int]] = []
    forward = target.forward_rows

    def watched(ids: torch.Tensor, cache: RowCache, **options: Any) -> object:
        output = forward(ids, cache, **options)
        widths.append((cache.num_rows, max(cache.lengths)))
        rooms.append(cache.room)
        return output

    target.forward_rows = watched  # type: ignore[method-assign, assignment]
    requests = [*_requests(40), *(Request(f"l{i}", tuple(random_prompt(900, seed=i)), 0) for i in range(3))]
    _answers(target, requests, GenerationSettings(10, frozenset()), batch_tokens=1000)
    assert max(rows * longest for rows, longest in widths) <= 1000
    assert max(rows for rows, _ in widths) > 15
    assert max(length for _, length in rooms) > 900
    assert max(rows * length for rows, length in rooms if rows > 1) < 40 * 2 * STEP


def test_a_prompt_longer_than_a_forward_may_be_passes_alone() -> None:
    target = random_target(max_positions=PREFILL_TOKENS + 64)
    requests = [Request("long", tuple(random_prompt(PREFILL_TOKENS + 9, seed=1)), 0), *_requests(3)]
    got = _answers(target, requests, GenerationSettings(4, frozenset()), batch_tokens=50_000)
    for request in requests:
        assert list(got[request.id].token_ids) == _alone(target, request, 4, frozenset())


def test_seeds_differ_by_request_and_by_run() -> None:
    seeds = {request_seed(run, name) for run in range(3) for name in ("a", "a#2", "b")}
    assert len(seeds) == 9
    assert request_seed(3, "a") == request_seed(3, "a")
    assert all(0 <= seed < 2**63 for seed in seeds)
