"""Which of a drafter's weights are trained: all, a small part of its own, or low-rank updates of all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from dflash_core.models.drafter import Drafter

MODES = ("full", "lora", "private")

_PRIVATE = ("fc.", "hidden_norm.", "norm.")
"""What reads the target's features, and the norms: the part that is bound to one target most closely."""


def prepare(drafter: Drafter, mode: str, *, lora_rank: int, seed: int) -> None:
    """Freeze what `mode` does not train; for "lora", put low-rank updates on every matrix.

    "private" trains the projection of the features and every norm, the rest being shared between targets
    (after EDA, arXiv 2603.09527, which adds experts; the published layout has no place for those).
    """
    drafter.requires_grad_(mode == "full")
    if mode == "private":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith(_PRIVATE) or "norm" in name.split(".")[-2])
    elif mode == "lora":
        generator = torch.Generator().manual_seed(seed)
        for module in [m for m in drafter.modules() if isinstance(m, nn.Linear)]:
            parametrize.register_parametrization(
                module, "weight", _LowRank(module.weight, lora_rank, generator)
            )
    elif mode != "full":
        raise ValueError(f"{mode} is no mode of training; those there are: {', '.join(MODES)}")


def merge(drafter: Drafter) -> Drafter:
    """Low-rank updates added to the matrices that they update; `drafter` itself, as it is saved."""
    for module in drafter.modules():
        if isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return drafter


def trainable(drafter: Drafter) -> list[nn.Parameter]:
    """The parameters that take part, in a fixed order."""
    return [p for p in drafter.parameters() if p.requires_grad]


class _LowRank(nn.Module):
    """W -> W + up @ down, which begins as W (LoRA, arXiv 2106.09685, with alpha = rank)."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(torch.zeros(rows, rank).to(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down
