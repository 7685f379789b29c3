"""The objective against direct, slow implementations, one slot at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dflash_core.training import objective
from dflash_core.training.anchors import IGNORED
from dflash_core.training.losses import LOSSES
from dflash_core.training.objective import Objective, block_loss
from dflash_core.training.slot_weights import decay_weights, default_gamma, dpace_weights

VOCAB, WIDTH, BLOCK = 23, 12, 5


def _direct_lk(p: Tensor, q: Tensor) -> Tensor:
    share = math.exp(-3 * torch.minimum(p, q).sum().item())
    kl = sum(p[v] * (p[v].log() - q[v].log()) for v in range(VOCAB))
    return share * kl + (1 - share) * (1 - torch.minimum(p, q).sum())


DIRECT: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "ce": lambda _p, q, label: -q[label].log(),
    "kl": lambda p, q, _label: sum(p[v] * (p[v].log() - q[v].log()) for v in range(VOCAB)),  # type: ignore[return-value,misc]
    "tv": lambda p, q, _label: 0.5 * (p - q).abs().sum(),
    "nla": lambda p, q, _label: -(1 - 0.5 * (p - q).abs().sum()).log(),
    "lk": lambda p, q, _label: _direct_lk(p, q),
}


def _blocks() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(6, BLOCK, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64) / 3
    labels = torch.randint(0, VOCAB, (6, BLOCK - 1))
    labels[1, 2:], labels[4, 1:] = IGNORED, IGNORED
    return hidden, head, labels, torch.randn(6, BLOCK - 1, WIDTH, dtype=torch.float64)


def _direct_dpace(q: Tensor, labels: Tensor) -> Tensor:
    weights = torch.zeros(labels.shape, dtype=torch.float64)
    for anchor in range(labels.shape[0]):
        slots = [k for k in range(labels.shape[1]) if labels[anchor, k] != IGNORED]
        for k in slots:
            for i in (i for i in slots if i >= k):
                product = 1.0
                for j in range(i + 1):
                    product *= 0.5 * q[anchor, j].item() + 0.5
                weights[anchor, k] += product
    return weights


@pytest.mark.parametrize("rows", [1, 3, 2048])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_the_objective_equals_its_formula_in_value_and_gradient(
    loss: str, weights: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objective, "_HEAD_ROWS", rows)
    hidden, head, labels, teacher = _blocks()
    q = (hidden[:, 1:] @ head.T).softmax(dim=-1)
    p = (teacher @ head.T).softmax(dim=-1)
    probabilities = q.gather(2, labels.clamp_min(0)[..., None])[..., 0]
    if weights == "decay":
        weighed = decay_weights(BLOCK, 2.0).double() * (labels != IGNORED)
    else:
        weighed = _direct_dpace(probabilities, labels)
    direct = sum(
        (
            weighed[a, k] * DIRECT[loss](p[a, k], q[a, k], int(labels[a, k]))
            for a in range(6)
            for k in range(BLOCK - 1)
            if labels[a, k] != IGNORED
        ),
        start=torch.zeros((), dtype=torch.float64),
    )
    result = block_loss(hidden, head, labels, Objective(loss, weights, gamma=2.0), teacher)
    # Logits are taken to float32 for the softmax.
    assert result.total.item() == pytest.approx(direct.item(), rel=1e-5)
    assert result.weight == pytest.approx(float(weighed.sum()), rel=1e-5)
    (mine,) = torch.autograd.grad(result.total, hidden)
    (reference,) = torch.autograd.grad(direct, hidden)
    assert (mine - reference).abs().max() < 1e-5


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_a_loss_is_least_where_the_drafter_says_what_the_target_says(loss: str) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (4,))
    target = torch.randn(4, VOCAB)
    target[torch.arange(4), labels] += 30  # so sure of itself that its token is all but certain
    same = LOSSES[loss](target, labels, target)
    other = LOSSES[loss](target.roll(1, dims=-1), labels, target)
    assert same.abs().max() < 0.02 < other.min()


@pytest.mark.parametrize(("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_the_papers_decay(block: int, gamma: float) -> None:
    assert default_gamma(block) == gamma
    expected = [math.exp(-(k - 1) / gamma) for k in range(1, block)]
    assert decay_weights(block, gamma).tolist() == pytest.approx(expected)


def test_dpace_weighs_what_decoding_reaches() -> None:
    """Sure of everything, a slot counts for all slots from it on; unsure of the first, hardly any counts."""
    labeled = torch.tensor([[True, True, True], [True, True, False]])
    sure = dpace_weights(torch.ones(2, 3), labeled)
    assert sure.tolist() == [[3.0, 2.0, 1.0], [2.0, 1.0, 0.0]]
    lost = dpace_weights(torch.tensor([[0.0, 1.0, 1.0]]), labeled[:1])
    assert lost.tolist() == [[1.5, 1.0, 0.5]]


def test_the_proxy_counts_whole_prefixes_only() -> None:
    head = torch.eye(4)
    labels = torch.tensor([[1, 2, 3], [1, 2, IGNORED], [1, 1, 1]])
    guesses = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 3], [0, 0, 1, 1]])
    result = block_loss(head[guesses], head, labels, Objective())
    # Blocks accept 3, 1 and 0 drafts: a right guess behind a wrong one counts for nothing.
    assert (result.chain, result.blocks) == (4.0, 3)
