"""The chain over a known answer against decoding that answer for real."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_core.decoding.speculate import speculate
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.training.anchors import possible_anchors
from dflash_core.training.blocks import accepted_drafts
from dflash_core.training.chain import walk
from dflash_core.training.documents import Documents
from dflash_core.training.held_out import acceptance, held_out_sums, split
from tests.dflash_core.small_models import (
    drafter_config,
    feature_set,
    greedy_samples,
    random_target,
    trained_drafter,
)


def test_the_chain_is_what_decoding_walks(tmp_path: Path) -> None:
    target = random_target()
    config = drafter_config(target)
    drafter = trained_drafter(target, config, tmp_path)
    samples = greedy_samples(target, count=6, new_tokens=40)
    rows = feature_set(target, config, samples, tmp_path / "s.arrow")
    tokens = rounds = 0
    for sample, row in zip(samples, rows, strict=True):
        ((start, _),) = sample.spans
        decoded = speculate(
            target,
            drafter,
            list(sample.input_ids[:start]),
            max_new_tokens=40,
            stop_ids=(),
            temperature=0.0,
            seed=0,
        )
        anchors = possible_anchors(row.loss_mask)
        documents = Documents.of([row], [anchors])
        accepted, _ = accepted_drafts(drafter, target.embedding_weight, target.head_weight, documents)
        chain = walk(row.loss_mask, accepted)
        # Features were rounded to bfloat16 on their way, which flips no draft here.
        steps = torch.tensor(decoded.emitted).cumsum(0)
        assert chain.anchors.tolist() == [start, *(start + steps[:-1]).tolist()]
        assert (chain.tokens, len(chain.anchors)) == (sum(decoded.emitted), len(decoded.emitted))
        tokens, rounds = tokens + chain.tokens, rounds + len(chain.anchors)
    sums = held_out_sums(drafter, target.embedding_weight, target.head_weight, rows)
    found = acceptance(sums)
    assert found is not None and found.tau == tokens / rounds > 1.05


def test_every_response_of_a_conversation_has_a_chain_of_its_own() -> None:
    mask = torch.zeros(20, dtype=torch.bool)
    mask[2:8] = mask[12:15] = True
    accepted = torch.tensor([1, 0, 0, 2, 1, 0, 1])  # at 2, 3, 4, 5, 6 and at 12, 13
    chain = walk(mask, accepted)
    # 2 emits 3 and 4, 4 emits 5, 5 emits 6 and 7, which ends the response: no token of the target's own
    # follows. 12 emits 13, 13 emits 14, its last.
    assert chain.anchors.tolist() == [2, 4, 5, 12, 13]
    assert chain.tokens == 2 + 1 + 2 + 1 + 1


def test_held_out_samples_are_few_and_the_same_every_time(tmp_path: Path) -> None:
    target = random_target()
    config = drafter_config(target)
    rows = feature_set(target, config, greedy_samples(target, count=60, new_tokens=4), tmp_path / "s.arrow")
    trained, held = split(rows, seed=1)
    assert (trained, held) == split(rows, seed=1) != split(rows, seed=2)
    assert len(held) == 3
    assert sorted(trained + held) == list(range(60))
    few = FeatureSet([_few(target, config, tmp_path)])
    assert split(few, seed=1) == (list(range(39)), [])


def _few(target: object, config: object, folder: Path) -> Path:
    path = folder / "few.arrow"
    feature_set(target, config, greedy_samples(target, count=39, new_tokens=4), path)  # type: ignore[arg-type]
    return path
