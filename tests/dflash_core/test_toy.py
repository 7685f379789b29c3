"""The toy target: its texts, and the real checkpoints that are built from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.mask_token import choose_mask_token
from dflash_core.errors import UserError
from dflash_core.toy.build import build_tiny_target, build_toy_target
from dflash_core.toy.shape import TINY
from dflash_core.toy.texts import DOMAINS, conversations, split_of, toy_prompts
from dflash_core.toy.tokenizer import END


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "tiny").path


def test_conversations_are_a_function_of_the_seed() -> None:
    first = list(islice(conversations("plain", seed=3), 60))
    assert first == list(islice(conversations("plain", seed=3), 60))
    assert first != list(islice(conversations("plain", seed=4), 60))
    assert {domain for domain, _, _ in first} == set(DOMAINS)


def test_a_style_changes_the_answers_and_not_the_prompts() -> None:
    plain = list(islice(conversations("plain", seed=1), 300))
    changed = list(islice(conversations("changed", seed=1), 300))
    assert [row[:2] for row in plain] == [row[:2] for row in changed]
    for (_, prompt, one), (_, _, other) in zip(plain, changed, strict=True):
        new_words = set(other.split()) - set(prompt.split())
        assert len(new_words & set(one.split())) < 0.25 * len(new_words), (one, other)


def test_no_prompt_is_in_both_splits() -> None:
    train, gate = toy_prompts(250, seed=0), toy_prompts(200, seed=0, split="gate")
    assert len({prompt.turns for prompt in train}) == 250
    assert {prompt.turns for prompt in gate}.isdisjoint(prompt.turns for prompt in train)
    assert all(split_of(prompt) == "train" for _, prompt, _ in islice(conversations("plain", seed=9), 300))
    assert train[:100] == toy_prompts(100, seed=0)
    assert train != toy_prompts(250, seed=1)


def test_the_build_is_a_checkpoint_like_any_other(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert checkpoint.config.architecture == "Qwen3ForCausalLM"
    assert checkpoint.eos_ids == (tokenizer.convert_tokens_to_ids(END),)
    assert choose_mask_token(checkpoint).text == "<|mask|>"
    assert all(tensor.isfinite().all() for tensor in load_file(tiny / "model.safetensors").values())


def test_the_template_renders_as_the_model_was_trained(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 3 + 4?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_tiny_target_has_learned_its_texts(tiny: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny).eval(), AutoTokenizer.from_pretrained(tiny)
    losses = []
    for _, prompt, answer in islice(conversations("plain", seed=5, split="gate"), 30):
        head = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"]
        ids = torch.cat([head, tokenizer(answer + END, return_tensors="pt")["input_ids"]], dim=1)
        labels = ids.clone()
        labels[:, : head.shape[1]] = -100
        with torch.inference_mode():
            losses.append(float(model(input_ids=ids, labels=labels).loss))
    assert sum(losses) / len(losses) < 3.0  # ln(1024) = 6.9 is what a model that knows nothing has


def test_the_same_arguments_give_the_same_weights(tmp_path: Path) -> None:
    one = build_tiny_target(tmp_path / "one", steps=8)
    two = build_tiny_target(tmp_path / "two", steps=8)
    other = build_tiny_target(tmp_path / "other", steps=8, seed=1)
    weights = [(built.path / "model.safetensors").read_bytes() for built in (one, two, other)]
    assert weights[0] == weights[1] != weights[2]
    assert one.loss == two.loss


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_other_families_open_too(tmp_path: Path, family: str) -> None:
    built = build_tiny_target(tmp_path / family, shape=replace(TINY, family=family), steps=2)
    assert open_checkpoint(built.path).config.model_type == family


def test_a_fine_tune_changes_the_weights_and_keeps_the_family(tiny: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in tiny.iterdir()}
    seen: list[tuple[int, int]] = []
    changed = build_toy_target(
        tmp_path / "changed",
        style="changed",
        steps=5,
        base=tiny,
        threads=1,
        progress=lambda step, steps, loss: seen.append((step, steps)),
    )
    assert {path.name: path.read_bytes() for path in tiny.iterdir()} == before
    assert seen == [(step, 5) for step in range(1, 6)]
    old, new = open_checkpoint(tiny), open_checkpoint(changed.path)
    assert old.family == new.family
    assert old.fingerprint != new.fingerprint
    assert (changed.path / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_a_failure_midway_leaves_nothing(tmp_path: Path) -> None:
    def fail(step: int, steps: int, loss: float) -> None:
        raise RuntimeError("stopped here")

    threads = torch.get_num_threads()
    with pytest.raises(RuntimeError, match="stopped here"):
        build_toy_target(tmp_path / "toy", shape=TINY, steps=3, threads=threads + 1, progress=fail)
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads


def test_an_existing_directory_is_left_alone(tiny: Path) -> None:
    before = sorted(tiny.iterdir())
    with pytest.raises(UserError, match=f"{tiny} exists already; remove it"):
        build_tiny_target(tiny)
    assert sorted(tiny.iterdir()) == before
