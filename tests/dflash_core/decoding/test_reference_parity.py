"""Our drafter and decoding against the published `dflash` package: same weights, same everything."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from dflash_core.decoding.speculate import speculate
from dflash_core.models.drafter import ContextCache, Drafter, load_drafter, save_drafter
from dflash_core.models.target import Target
from tests.dflash_core.small_models import (
    VOCAB,
    drafter_config,
    random_prompt,
    random_target,
    trained_drafter,
)

reference = pytest.importorskip("dflash.model", reason="the published dflash package is not installed")

CONFIGURATIONS = {
    "block 4": {"block_size": 4},
    "block 8, sliding windows": {
        "block_size": 8,
        "layer_types": ("sliding_attention", "sliding_attention"),
        "sliding_window": 6,
    },
    "block 16, mixed layers": {
        "block_size": 16,
        "layer_types": ("sliding_attention", "full_attention"),
        "sliding_window": 9,
    },
    "block 8, yarn": {
        "block_size": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10_000.0,
            "original_max_position_embeddings": 64,
        },
    },
    "block 8, dynamic RoPE": {
        "block_size": 8,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    },
    "block 16, scaled RoPE": {
        "block_size": 16,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(seed=3)


@pytest.fixture(scope="module", params=CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def pair(
    request: pytest.FixtureRequest, target: Target, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Drafter, object]:
    """(ours, theirs), both loaded from the directory that ours saved."""
    folder: Path = tmp_path_factory.mktemp("drafter")
    save_drafter(trained_drafter(target, drafter_config(target, **request.param), folder), folder / "saved")
    ours = load_drafter(folder / "saved")
    theirs = reference.DFlashDraftModel.from_pretrained(folder / "saved").eval()
    return ours, theirs


@torch.inference_mode()
def test_draft_logits_are_the_same_round_after_round(pair: tuple[Drafter, object], target: Target) -> None:
    ours, theirs = pair
    size = ours.config.block_size
    prompt = torch.tensor([random_prompt(40, seed=9)])
    features = target.forward(prompt, layer_ids=ours.config.target_layer_ids).features[0]
    cache, their_cache = ContextCache(), DynamicCache(config=theirs.config)
    their_cache.activate_past_recording()
    for start, end in ((0, 1), (1, 17), (17, 18), (18, 40)):
        ids = torch.full((size,), ours.config.mask_token_id)
        ids[0] = 7
        block = F.embedding(ids, target.embedding_weight)
        mine = ours.draft_block(block, features[start:end], cache)
        other = theirs(
            target_hidden=features[None, start:end],
            noise_embedding=block[None],
            position_ids=torch.arange(start, end + size)[None],
            past_key_values=their_cache,
            use_cache=True,
        )[0]
        their_cache.crop(end - their_cache.get_seq_length())
        logits, their_logits = (F.linear(h, target.head_weight) for h in (mine, other))
        assert (logits - their_logits).abs().max() <= 1e-5 * their_logits.abs().max().clamp_min(1)


@torch.inference_mode()
def test_bf16_rotates_as_exactly_as_the_reference(pair: tuple[Drafter, object], tmp_path: Path) -> None:
    """Far out in the context: frequencies rounded with the weights would be off by whole turns there."""
    ours, theirs = pair
    save_drafter(ours, tmp_path)
    ours = load_drafter(tmp_path, dtype=torch.bfloat16)
    theirs = reference.DFlashDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    positions, like = torch.tensor([0, 17, 200, 3000, 30_000]), torch.zeros(5, 8, dtype=torch.bfloat16)
    for mine, other in zip(
        ours._rope(positions, like), theirs.rotary_emb(like[None], positions[None]), strict=True
    ):
        assert torch.equal(mine, other[0])


@pytest.mark.parametrize("length", [1, 2, 7, 33])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 29])
def test_greedy_output_and_every_round_are_the_same(
    pair: tuple[Drafter, object],
    target: Target,
    length: int,
    max_new_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    ours, theirs = pair
    prompt = random_prompt(length, seed=length)
    expected = reference.dflash_generate(
        theirs, target.model, torch.tensor([prompt]), max_new_tokens, None, return_stats=True
    )
    decoded = speculate(target, ours, prompt, max_new_tokens=max_new_tokens, stop_ids=())
    assert list(decoded.response_ids) == expected.output_ids[0, length:].tolist()
    assert list(decoded.emitted) == expected.acceptance_lengths


def test_a_stop_token_inside_a_block_ends_both_alike(
    pair: tuple[Drafter, object], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    ours, theirs = pair
    prompt = random_prompt(8, seed=0)  # one that the drafter was trained on, so that drafts are accepted
    free = speculate(target, ours, prompt, max_new_tokens=24, stop_ids=()).response_ids
    for stop in sorted(set(free)):
        expected = reference.dflash_generate(
            theirs, target.model, torch.tensor([prompt]), 24, [stop], return_stats=True
        )
        decoded = speculate(target, ours, prompt, max_new_tokens=24, stop_ids=(stop,))
        assert list(decoded.response_ids) == expected.output_ids[0, 8:].tolist()
        assert list(decoded.emitted) == expected.acceptance_lengths


def test_the_drafters_compared_do_get_drafts_accepted(pair: tuple[Drafter, object], target: Target) -> None:
    """Without this the parity above could hold on rounds of one token each."""
    ours, _ = pair
    decoded = [
        speculate(target, ours, random_prompt(8, seed), max_new_tokens=30, stop_ids=()) for seed in range(4)
    ]
    rounds = sum(len(d.emitted) for d in decoded)
    assert sum(sum(d.emitted) for d in decoded) / rounds > 1.5
    assert all(0 <= token < VOCAB for d in decoded for token in d.response_ids)
