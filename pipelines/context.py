"""What every stage of one realignment shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.fingerprint import SHORT
from dflash_core.store.artifacts import Store
from dflash_core.types import Checkpoint
from pipelines.config import RealignConfig
from pipelines.placement import Placement
from pipelines.stage import OnEvent


@dataclass(frozen=True)
class Context:
    """One realignment's surroundings: resolved configuration, store, validated target, placement."""

    config: RealignConfig
    store: Store
    checkpoint: Checkpoint
    guard: TargetGuard
    """Tells whether that target is still what stands in its directory."""
    placement: Placement
    connect: Callable[[], object]
    """Starts or joins Ray; called only when a stage really has work to hand out."""
    on_event: OnEvent

    @property
    def target_name(self) -> str:
        """The target in a word, for metrics' labels."""
        return self.checkpoint.fingerprint[:SHORT]
