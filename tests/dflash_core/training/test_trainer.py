"""Training: deterministic, exactly resumable, the same for one worker and two, and it learns."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.errors import UserError
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.models.drafter import ContextCache, new_drafter
from dflash_core.models.drafter_config import DrafterConfig
from dflash_core.models.target import Target
from dflash_core.training.anchors import IGNORED, pack_anchors
from dflash_core.training.blocks import draft_blocks
from dflash_core.training.documents import Documents
from dflash_core.training.objective import Objective
from dflash_core.training.trainer import Reducer, StepReport, Trainer
from tests.dflash_core.small_models import (
    drafter_config,
    feature_set,
    greedy_samples,
    tapped,
    train_options,
)


@pytest.fixture(scope="module")
def rows(target: Target, config: DrafterConfig, tmp_path_factory: pytest.TempPathFactory) -> FeatureSet:
    return feature_set(target, config, greedy_samples(target), tmp_path_factory.mktemp("f") / "f.arrow")


def _trainer(
    target: Target, config: DrafterConfig, rows: FeatureSet, reducer: Reducer | None = None
) -> Trainer:
    drafter = new_drafter(config, start=None, seed=0)
    options = train_options(config, steps=12)
    return Trainer(drafter, target.embedding_weight, target.head_weight, rows, options, reducer)


def _weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.drafter.parameters()])


@pytest.mark.parametrize(
    ("layer_types", "window"),
    [
        (("full_attention", "full_attention"), None),
        (("sliding_attention", "sliding_attention"), 5),
        (("full_attention", "sliding_attention"), 9),
    ],
)
@torch.inference_mode()
def test_the_training_forward_equals_the_decoding_forward(
    target: Target, layer_types: tuple[str, ...], window: int | None
) -> None:
    """At every anchor of two packed documents: same hidden states as decoding at that position."""
    config = drafter_config(target, layer_types=layer_types, sliding_window=window)
    drafter = new_drafter(config, start=None, seed=1)
    samples = greedy_samples(target, count=2, new_tokens=20)
    documents = [torch.tensor(s.input_ids) for s in samples]
    features = [tapped(target, d[None], config.target_layer_ids)[0] for d in documents]
    anchors = [torch.arange(1, 26), torch.tensor([8, 9, 20])]
    masks = [torch.ones(len(d), dtype=torch.bool) for d in documents]
    batch = pack_anchors(documents, masks, anchors, config.block_size)
    ids = torch.full((batch.layout.num_anchors, config.block_size), config.mask_token_id)
    ids[:, 0] = batch.anchor_ids
    hidden = drafter.train_blocks(
        F.embedding(ids.flatten(), target.embedding_weight),
        torch.cat(features),
        torch.cat([torch.arange(len(d)) for d in documents]),
        batch.layout,
    ).view(batch.layout.num_anchors, config.block_size, -1)
    row = 0
    for document, taps, chosen in zip(documents, features, anchors, strict=True):
        for anchor in chosen.tolist():
            block = F.embedding(ids[row], target.embedding_weight)
            assert int(ids[row, 0]) == int(document[anchor])
            decoded = drafter.draft_block(block, taps[:anchor], ContextCache())
            assert (hidden[row] - decoded).abs().max() <= 1e-5
            row += 1


def test_a_resumed_run_walks_the_same_path(target: Target, config: DrafterConfig, rows: FeatureSet) -> None:
    whole = _trainer(target, config, rows)
    reports = []
    whole.run(reports.append)
    first = _trainer(target, config, rows)
    for _ in range(5):
        first.step()
    second = _trainer(target, config, rows)
    second.load(first.state())
    again = []
    second.run(again.append)
    assert [r.loss for r in again] == [r.loss for r in reports[5:]]
    assert torch.equal(_weights(second), _weights(whole))


def test_soft_losses_see_the_distribution_that_the_target_itself_has(
    target: Target, config: DrafterConfig, tmp_path: Path
) -> None:
    samples = greedy_samples(target, count=3, new_tokens=12)
    rows = feature_set(target, config, samples, tmp_path / "s.arrow", last_hidden=True)
    chosen = [rows[0], rows[2]]
    documents = Documents.of(chosen, [torch.tensor([8, 12]), torch.tensor([9])], last_hidden=True)
    drafter = new_drafter(config, start=None, seed=1)
    _, batch = draft_blocks(drafter, target.embedding_weight, documents)
    assert documents.last_hidden is not None
    teacher = documents.last_hidden.float()[batch.teachers] @ target.head_weight.T
    logits = torch.cat([target.forward(row.input_ids[None].long()).logits[0] for row in chosen])
    labeled = batch.labels != IGNORED
    # bfloat16 keeps 8 bits of mantissa.
    assert (teacher - logits[batch.teachers])[labeled].abs().max() <= logits.abs().max() / 64
    # Greedy answers are what that distribution likes best.
    assert torch.equal(teacher.argmax(dim=-1)[labeled], batch.labels[labeled])


@pytest.mark.parametrize("loss", ["kl", "tv", "nla", "lk"])
def test_every_soft_loss_trains(loss: str, target: Target, config: DrafterConfig, tmp_path: Path) -> None:
    samples = greedy_samples(target, count=8)
    rows = feature_set(target, config, samples, tmp_path / "s.arrow", last_hidden=True)
    options = train_options(config, steps=60, objective=Objective(loss))
    drafter = new_drafter(config, start=None, seed=0)
    trainer = Trainer(drafter, target.embedding_weight, target.head_weight, rows, options)
    reports: list[StepReport] = []
    trainer.run(reports.append)
    losses = [report.loss for report in reports]
    assert sum(losses[-10:]) < 0.98 * sum(losses[:10]), losses


class _Pair:
    """Two workers in two threads that add up their tensors, as torch.distributed does in processes."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.slots: list[Tensor] = [torch.empty(0)] * 2

    def worker(self, rank: int) -> Reducer:
        pair = self

        class Worker(Reducer):
            world_size = 2

            def sum(self, tensor: Tensor) -> Tensor:
                pair.slots[rank] = tensor
                pair.barrier.wait()
                total = pair.slots[0] + pair.slots[1]
                pair.barrier.wait()
                return total

        worker = Worker()
        worker.rank = rank
        return worker


def test_two_workers_take_the_step_of_one(target: Target, config: DrafterConfig, rows: FeatureSet) -> None:
    alone = _trainer(target, config, rows)
    expected = [alone.step() for _ in range(4)]
    pair = _Pair()
    trainers = [_trainer(target, config, rows, pair.worker(rank)) for rank in (0, 1)]
    losses: dict[int, list[float]] = {0: [], 1: []}

    def work(rank: int) -> None:
        losses[rank] = [trainers[rank].step().loss for _ in range(4)]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert losses[0] == losses[1] == pytest.approx([r.loss for r in expected], rel=1e-4)
    assert torch.allclose(_weights(trainers[0]), _weights(alone), atol=1e-4)


def test_mixed_precision_as_on_gpus_takes_nearly_the_same_step(
    target: Target, config: DrafterConfig, rows: FeatureSet
) -> None:
    plain, mixed = (_trainer(target, config, rows) for _ in range(2))
    mixed.mixed_precision = True
    for _ in range(3):
        expected, report = plain.step(), mixed.step()
        assert report.loss == pytest.approx(expected.loss, rel=0.02)
    assert all(p.dtype == torch.float32 for p in mixed.drafter.parameters())


def test_training_lowers_the_loss(target: Target, config: DrafterConfig, rows: FeatureSet) -> None:
    drafter = new_drafter(config, start=None, seed=0)
    options = train_options(config, steps=40)
    reports = []
    Trainer(drafter, target.embedding_weight, target.head_weight, rows, options).run(reports.append)
    early, late = (sum(r.loss for r in part) / 5 for part in (reports[:5], reports[-5:]))
    assert late < 0.8 * early
    assert reports[-1].proxy_tau > reports[0].proxy_tau + 0.1


def test_answers_too_short_to_learn_from_are_refused(
    target: Target, config: DrafterConfig, tmp_path: Path
) -> None:
    samples = greedy_samples(target, count=3, new_tokens=1)
    rows = feature_set(target, config, samples, tmp_path / "f.arrow")
    with pytest.raises(UserError, match="two tokens or more"):
        _trainer(target, config, rows)
