"""The learning rate over the steps of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Warm-up, then a cosine to zero over all steps, or constant with a linear decay at the end (WSD)."""

    kind: Literal["cosine", "wsd"]
    steps: int
    """Optimizer steps, at most."""
    warmup_fraction: float
    decay_fraction: float
    """Of WSD: the share of the steps that the decay takes."""

    @property
    def decay_steps(self) -> int:
        return max(1, round(self.decay_fraction * self.steps))

    def last_step(self, converged_at: int | None) -> int:
        """Where training ends; `converged_at`: the step at which the held-out metric stood still, if it did.

        A cosine ends there; WSD takes its decay first, since that is where it gains.
        """
        if converged_at is None:
            return self.steps
        return min(self.steps, converged_at + (self.decay_steps if self.kind == "wsd" else 0))

    def factor(self, step: int, converged_at: int | None = None) -> float:
        """The share of the peak rate at `step`, counted from 0."""
        warmup = max(1, round(self.warmup_fraction * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        if self.kind == "cosine":
            progress = (step - warmup) / max(1, self.steps - warmup)
            return 0.5 * (1 + math.cos(math.pi * progress))
        left = self.last_step(converged_at) - step
        return min(1.0, left / self.decay_steps)
