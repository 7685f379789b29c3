"""Which generation engine answers the training prompts, and how a worker makes it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.config import RealignConfig
from pipelines.placement import Placement
from pipelines.ray_job import in_ray_job

if TYPE_CHECKING:
    from dflash_core.generation.engine import Engine
    from dflash_core.types import Checkpoint


@dataclass(frozen=True)
class EngineOptions:
    """What a worker needs to know to make an engine."""

    name: str
    max_new_tokens: int
    temperature: float
    top_p: float
    batch_tokens: int

    @classmethod
    def of(cls, config: RealignConfig) -> EngineOptions:
        """From a configuration whose budget is filled in."""
        options = config.generate
        assert options.max_new_tokens is not None
        assert options.batch_tokens is not None
        return cls(
            name=options.engine,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            batch_tokens=options.batch_tokens,
        )


def check_engine(config: RealignConfig) -> None:
    """Raise UserError now if the engine that was asked for cannot be made later.

    On a cluster that is reached from outside, its actors alone can know: there it is they who raise it.
    """
    if config.generate.engine != "vllm":
        return
    if config.ray_address or os.environ.get("RAY_ADDRESS") or in_ray_job():
        return
    from dflash_core.generation.vllm_engine import require_vllm

    require_vllm()


def make_engine(options: EngineOptions, checkpoint: Checkpoint, placement: Placement) -> Engine:
    """The engine, with the target loaded: by us into this process's one place for it, or by vLLM."""
    from dflash_core.generation.engine import GenerationSettings

    settings = GenerationSettings(
        max_new_tokens=options.max_new_tokens,
        stop_ids=frozenset(checkpoint.eos_ids),
        temperature=options.temperature,
        top_p=options.top_p,
    )
    if options.name == "vllm":
        return _vllm(options, checkpoint, placement, settings)
    from dflash_core.generation.batched_decoding import BatchedEngine
    from pipelines.workers import start_target

    target = start_target(checkpoint, placement)
    return BatchedEngine(target, settings, batch_tokens=options.batch_tokens)


def _vllm(options: EngineOptions, checkpoint: Checkpoint, placement: Placement, settings: Any) -> Engine:
    from dflash_core.generation.vllm_engine import VllmEngine

    return VllmEngine(
        checkpoint.path,
        checkpoint.config,
        settings,
        device="cuda" if placement.device == "cuda" else "cpu",
        dtype="bfloat16" if placement.dtype == "bfloat16" else "float32",
        batch_tokens=options.batch_tokens,
        gpus=placement.gpus_per_actor,
        threads=placement.threads,
    )
