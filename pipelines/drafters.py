"""Drafters on their way through the flow: a new one's shape, the trained one, what the gate asks."""

from __future__ import annotations

from dflash_core.checkpoints.mask_token import MaskToken
from dflash_core.decision.gate import GatePolicy
from dflash_core.decoding.acceptance import tau_from_rate
from dflash_core.errors import UserError
from dflash_core.models.drafter_config import DrafterConfig, config_for_target
from dflash_core.models.drafter_identity import FILES, drafter_fingerprint
from dflash_core.types import Checkpoint
from pipelines.budget import DEFAULT_MIN_TAU
from pipelines.config import RealignConfig
from pipelines.evaluate import Subject
from pipelines.stage import StageResult


def first_drafter(config: RealignConfig, checkpoint: Checkpoint, mask: MaskToken) -> DrafterConfig:
    """The shape of a drafter trained from nothing for this target. Raises UserError if it cannot be."""
    options = config.drafter
    return config_for_target(
        checkpoint.config,
        mask_token_id=mask.id,
        block_size=options.block_size or 16,
        num_layers=options.num_layers or 5,
        target_layer_ids=options.target_layer_ids,
        sliding_window=options.sliding_window,
        layer_types=options.layer_types,
    )


def candidate_of(trained: StageResult, shape: DrafterConfig) -> Subject:
    """The drafter that a train stage left."""
    records = {r.name: r.sha256 for r in trained.artifact.files if r.name.startswith("drafter/")}
    return Subject(
        role="candidate",
        artifact=trained.artifact,
        fingerprint=drafter_fingerprint({name: records[f"drafter/{name}"] for name in FILES}),
        block_size=shape.block_size,
    )


def gate_policy(config: RealignConfig, block_size: int) -> GatePolicy:
    """The configured gate, its threshold turned into τ.

    Raises UserError for a τ beyond the block, and for sampling, whose losslessness cannot be compared
    token for token, so that nothing would ever pass.
    """
    gate = config.gate
    if config.evaluate.temperature > 0:
        raise UserError(
            f"--evaluate.temperature {config.evaluate.temperature} cannot be gated, since samples cannot be "
            "compared token for token with the target's own; leave it at 0, or measure with jobs/evaluate.py"
        )
    min_tau = gate.min_tau
    if min_tau is None:
        rate = gate.min_acceptance_rate
        min_tau = DEFAULT_MIN_TAU if rate is None else tau_from_rate(rate, block_size)
    if min_tau > block_size:
        raise UserError(
            f"--gate.min-tau {min_tau} can never be reached with a block size of {block_size}; lower it, or "
            "train another drafter with a larger --drafter.block-size (if one serves: --train.mode scratch)"
        )
    return GatePolicy(
        min_tau=min_tau,
        max_loss=gate.max_loss,
        certify_loss=gate.certify_loss,
        confidence=gate.confidence,
        min_prompts=gate.min_prompts,
        num_resamples=gate.num_resamples,
        seed=config.seed,
    )
