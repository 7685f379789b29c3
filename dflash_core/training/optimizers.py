"""The optimizers of a training, stepped as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Optimizers:
    """AdamW on everything, or Muon on the matrices and AdamW on the rest.

    Muon's updates are scaled to the size of AdamW's, so that one learning rate means the same for both
    (arXiv 2502.16982).
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], kind: str, *, learning_rate: float, weight_decay: float
    ) -> None:
        matrices = [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if p.dim() != 2]
        groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.0}]
        self._all: list[torch.optim.Optimizer] = []
        if kind == "muon" and matrices:
            self._all.append(
                torch.optim.Muon(
                    matrices, lr=learning_rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )
        else:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        groups = [group for group in groups if group["params"]]
        if groups:
            self._all.append(torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95)))

    def set_rate(self, learning_rate: float) -> None:
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    def step(self) -> None:
        for optimizer in self._all:
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._all]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._all, states, strict=True):
            optimizer.load_state_dict(state)
