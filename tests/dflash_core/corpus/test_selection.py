"""Scores of samples against real decoding, and who is kept against a direct count."""

from __future__ import annotations

import pytest
import torch

from dflash_core.corpus.selection import Rank, draft_score, lowest_kept, random_score, spread_anchors
from dflash_core.features.token_batches import loss_mask
from dflash_core.models.drafter import ContextCache, Drafter, new_drafter
from dflash_core.models.target import Target
from dflash_core.training.documents import Documents
from dflash_core.training.trainer import Trainer
from dflash_core.types import Sample
from tests.dflash_core.small_models import (
    drafter_config,
    feature_set,
    greedy_samples,
    random_target,
    tapped,
    train_options,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target()


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A drafter that knows a little, so that scores differ."""
    config = drafter_config(target)
    samples = greedy_samples(target, count=8)
    rows = feature_set(target, config, samples, tmp_path_factory.mktemp("rows") / "s.arrow")
    drafter = new_drafter(config, start=None, seed=1)
    head = target.head_weight
    trainer = Trainer(drafter, target.embedding_weight, head, rows, train_options(config, steps=60))
    trainer.run(lambda _report: None)
    return drafter.eval()


def _score(target: Target, drafter: Drafter, sample: Sample, most: int) -> float:
    ids = torch.tensor(sample.input_ids)
    features = tapped(target, ids[None], drafter.config.target_layer_ids)[0]
    mask = loss_mask(sample)
    documents = Documents([ids], [mask], [spread_anchors(mask, most)], features)
    return draft_score(drafter, target.embedding_weight, target.head_weight, documents)


@torch.inference_mode()
def _refused(target: Target, drafter: Drafter, sample: Sample, anchors: list[int]) -> float:
    """The same, draft by draft: what decoding from each anchor would have accepted."""
    size = drafter.config.block_size
    ids = torch.tensor(sample.input_ids)
    features = tapped(target, ids[None], drafter.config.target_layer_ids)[0]
    accepted = possible = 0
    for anchor in anchors:
        end = next(stop for start, stop in sample.spans if start <= anchor < stop)
        block = torch.full((size,), drafter.config.mask_token_id)
        block[0] = ids[anchor]
        hidden = drafter.draft_block(target.embedding_weight[block], features[:anchor], ContextCache())
        drafts = (hidden[1:] @ target.head_weight.T).argmax(dim=-1).tolist()
        truth = ids[anchor + 1 : end].tolist()
        possible += min(len(truth), size - 1)
        for draft, right in zip(drafts, truth, strict=False):
            if draft != right:
                break
            accepted += 1
    return 1 - accepted / possible


def test_a_score_is_the_share_of_drafts_that_decoding_would_refuse(target: Target, trained: Drafter) -> None:
    scores = []
    for sample in greedy_samples(target, count=12, new_tokens=24):
        anchors = spread_anchors(loss_mask(sample), 1000).tolist()
        score = _score(target, trained, sample, 1000)
        assert score == pytest.approx(_refused(target, trained, sample, anchors), abs=1e-6)
        scores.append(score)
    assert 0 < min(scores) < max(scores) <= 1


def test_drafts_past_the_end_of_a_response_do_not_count(target: Target, trained: Drafter) -> None:
    (whole,) = greedy_samples(target, count=1, new_tokens=24)
    sample = Sample("two", "test", whole.input_ids, ((8, 13), (20, 24)))
    anchors = [8, 9, 10, 11, 20, 21, 22]
    assert spread_anchors(loss_mask(sample), 1000).tolist() == anchors
    expected = _refused(target, trained, sample, anchors)
    assert _score(target, trained, sample, 1000) == pytest.approx(expected, abs=1e-6)


def test_a_sample_without_a_response_scores_nothing(target: Target, trained: Drafter) -> None:
    (whole,) = greedy_samples(target, count=1)
    assert _score(target, trained, Sample("none", "test", whole.input_ids, ((8, 9),)), 8) == 0.0


def test_anchors_are_spread_from_the_first_to_the_last() -> None:
    mask = torch.zeros(100, dtype=torch.bool)
    mask[10:91] = True
    assert spread_anchors(mask, 5).tolist() == [10, 30, 50, 69, 89]
    assert spread_anchors(mask, 1000).tolist() == list(range(10, 90))


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 0.99])
def test_the_fraction_is_of_tokens_and_its_samples_are_the_highest(fraction: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, 500, (300,), generator=generator).tolist()
    scores = (torch.randint(0, 40, (300,), generator=generator) / 40).tolist()  # many are equal
    ranks = [Rank.of(f"s{i}", score) for i, score in enumerate(scores)]
    lowest = lowest_kept(list(zip(ranks, tokens, strict=True)), fraction)
    kept = [i for i, rank in enumerate(ranks) if rank >= lowest]
    kept_tokens = sum(tokens[i] for i in kept)
    assert kept_tokens <= fraction * sum(tokens) < kept_tokens + 500 or len(kept) == 1
    assert min(scores[i] for i in kept) >= max(s for i, s in enumerate(scores) if i not in kept)


def test_random_scores_are_even_and_depend_on_name_and_seed_alone() -> None:
    scores = [random_score(f"prompt/{i}", seed=3) for i in range(4000)]
    counts = torch.histc(torch.tensor(scores), bins=10, min=0, max=1)
    assert ((counts - 400) ** 2 / 400).sum() < 27.9  # chi-square, 9 degrees of freedom, p = 0.001
    assert random_score("prompt/1", seed=3) == scores[1] != random_score("prompt/1", seed=4)
