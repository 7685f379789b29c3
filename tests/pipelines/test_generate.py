"""Stage `generate`: every turn answered as plain decoding does it, in the prompts' order, each time alike."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_core.checkpoints.checkpoint import load_tokenizer
from dflash_core.corpus.repetition import repeats_endlessly
from dflash_core.corpus.samples import answer_text, render
from dflash_core.corpus.turns import merge_turns
from dflash_core.decoding.speculate import speculate
from dflash_core.errors import UserError
from dflash_core.models.target import load_target
from dflash_core.toy.build import build_tiny_target
from dflash_core.toy.texts import toy_prompts
from dflash_core.types import Message, Prompt, Sample, opening
from pipelines import engines
from pipelines.cluster import ClusterInfo
from pipelines.config import GenerateSection, RealignConfig
from pipelines.context import Context
from tests.pipelines.generated import context_for, generated, sample_files, samples_of


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "target").path


@pytest.fixture(scope="module")
def shards() -> list[list[Prompt]]:
    """Two shards of toy prompts; every third is a conversation of two turns."""
    prompts = toy_prompts(24, seed=0)
    for i in range(0, 24, 3):
        prompts[i] = replace(prompts[i], turns=(*prompts[i].turns, *prompts[(i + 5) % 24].turns[:1]))
    return [prompts[:16], prompts[16:]]


def _expected(context: Context, prompt: Prompt, max_new_tokens: int) -> tuple[list[Sample], list[str]]:
    """The samples of a prompt, decoded turn by turn without any batch, and how each turn ended."""
    checkpoint = context.checkpoint
    target, tokenizer = load_target(checkpoint.path), load_tokenizer(checkpoint)
    messages, samples, endings = opening(prompt), [], []
    for turn in range(len(prompt.turns)):
        ids = render(tokenizer, messages)
        answer = speculate(
            target, None, ids, max_new_tokens=max_new_tokens, stop_ids=checkpoint.eos_ids
        ).response_ids
        stopped = answer[-1] in checkpoint.eos_ids
        endings.append("stop" if stopped else "repetitive" if repeats_endlessly(answer) else "length")
        if endings[-1] != "repetitive":
            name = prompt.id if turn == 0 else f"{prompt.id}#{turn + 1}"
            everything = (*ids, *answer)
            samples.append(Sample(name, prompt.domain, everything, ((len(ids), len(everything)),)))
        later = [Message("user", text) for text in prompt.turns[turn + 1 : turn + 2]]
        messages = [*messages, Message("assistant", answer_text(tokenizer, answer)), *later]
    return merge_turns(samples), endings


def test_answers_are_those_of_plain_decoding_in_the_prompts_order(
    tmp_path: Path, target: Path, shards: list[list[Prompt]], local_ray: ClusterInfo
) -> None:
    context = context_for(tmp_path, target, max_new_tokens=48, batch_tokens=700)
    result = generated(context, shards)
    prompts = [prompt for shard in shards for prompt in shard]
    expected = [_expected(context, prompt, 48) for prompt in prompts]
    samples = [sample for its, _ in expected for sample in its]
    assert samples_of(result) == samples
    meta, endings = result.artifact.meta, [ending for _, its in expected for ending in its]
    assert len(endings) == 24 + 8
    for ending in ("stop", "length", "repetitive"):
        assert meta[ending] == endings.count(ending)
    assert meta["stop"] > 0
    assert meta["samples"] == len(samples)
    assert meta["tokens"] == sum(sample.num_supervised for sample in samples)
    assert set(meta["domains"]) == {prompt.domain for prompt in prompts}
    for domain, counts in meta["domains"].items():
        its = [sample for sample in samples if sample.domain == domain]
        assert counts["samples"] == len(its)
        assert counts["tokens"] == sum(sample.num_supervised for sample in its)
    assert sum(counts["stop"] for counts in meta["domains"].values()) == meta["stop"]


def test_sampled_answers_are_the_same_bytes_again_and_say_how_they_were_made(
    tmp_path: Path, target: Path, shards: list[list[Prompt]], local_ray: ClusterInfo
) -> None:
    options = {"max_new_tokens": 24, "temperature": 1.2, "top_p": 0.9, "batch_tokens": 900}
    first, second = (
        generated(context_for(tmp_path / name, target, **options), shards) for name in ("one", "two")
    )
    assert not second.cached
    assert sample_files(first) == sample_files(second)
    meta = first.artifact.meta
    assert (meta["temperature"], meta["top_p"], meta["seed"]) == (1.2, 0.9, 3)
    assert meta["engines"] == [name for name in meta["engines"] if name.startswith("transformers ")] != []
    template = context_for(tmp_path / "one", target).checkpoint.chat_template
    assert meta["chat_template_sha256"] == hashlib.sha256(template.encode()).hexdigest()
    greedy = generated(context_for(tmp_path / "three", target, max_new_tokens=24), shards)
    assert sample_files(greedy) != sample_files(first)


def test_vllm_that_is_not_there_is_said_before_anything_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RealignConfig(target="nowhere", generate=GenerateSection(engine="vllm"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"--generate\.engine vllm needs vLLM, which is not installed"):
        engines.check_engine(config)
    engines.check_engine(RealignConfig(target="nowhere"))
    # The driver's environment says nothing about that of a cluster's actors.
    engines.check_engine(config.model_copy(update={"ray_address": "10.0.0.1:6379"}))
