"""`--dry-run`: what a realignment would do, what of it is there already, and how large the rest is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_core.fingerprint import SHORT
from dflash_core.models.drafter_config import DrafterConfig
from pipelines import evaluate, extract, generate, inspect, prompts, select, settled, traces, train
from pipelines.champion import Champion, known_champion
from pipelines.plan import Plan
from pipelines.prepare import Prepared

_BYTES_PER_TOKEN_OF_TEXT = 3
"""A cautious guess for prompts that have not been rendered yet: more tokens than there are."""


@dataclass(frozen=True)
class PlannedStage:
    """A stage that would run, or be found."""

    name: str
    identity: str | None
    """None where it depends on weights that are not trained yet."""
    cached: bool
    size: str
    """What it amounts to, in words."""


@dataclass(frozen=True)
class DryRun:
    """The plan of one realignment."""

    target_path: str
    target_fingerprint: str
    model_name: str
    champion_version: int | None
    settled: str | None
    """The outcome, where this very request is settled and nothing would be done."""
    mask_token: str
    tokens: int
    """Most tokens that the target would generate for training."""
    feature_bytes: int
    """Most bytes of features."""
    stages: tuple[PlannedStage, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {"dry_run": True, **asdict(self)}

    def text(self) -> str:
        """For a person at a terminal."""
        champion = "none, a first drafter would be trained"
        if self.champion_version is not None:
            champion = f"version {self.champion_version}, measured first"
        lines = [
            f"target     {self.target_path} ({self.target_fingerprint[:SHORT]})",
            f"model      {self.model_name}; champion: {champion}",
            f"mask       {self.mask_token}",
            f"at most    {self.tokens:,} generated tokens, {self.feature_bytes / 1e6:,.1f} MB of features",
        ]
        if self.settled is not None:
            return "\n".join([*lines, f"nothing to do: this request is settled ({self.settled})"])
        for stage in self.stages:
            state = "cached " if stage.cached else "to run "
            identity = stage.identity[:SHORT] if stage.identity else "-" * SHORT
            lines.append(f"  {state} {stage.name:<19} {identity}  {stage.size}")
        return "\n".join(lines)


_STARTS = {"target": "the target's own layers", "random": "random weights"}


def describe(prepared: Prepared) -> DryRun:
    """Look without touching: no stage runs and Ray is not started."""
    context, registry = prepared.context, prepared.registry
    config = context.config
    current = registry.parent_for(context.checkpoint.fingerprint)
    done = settled.find(context, registry, prepared.request, current)
    stages: list[PlannedStage] = []

    def add(name: str, plan: Plan | None, size: str) -> None:
        cached = plan is not None and plan.cached(context)
        stages.append(PlannedStage(name, plan.identity if plan else None, cached, size))

    chosen = prompts.look(context, prepared.prompts)
    gate = f"{chosen.num_gate:,} prompts x up to {config.evaluate.max_new_tokens} tokens"
    size = f"{chosen.num_train:,} + {chosen.num_gate:,} prompts"
    add("prompts", prompts.plan(prepared.prompts), size)
    add("inspect", inspect.plan(context, chosen), size)
    shape: DrafterConfig | None = prepared.shape
    parent: Champion | None = None
    if current is not None:
        measured = evaluate.plan(context, chosen.gate_fingerprint, current.drafter_fingerprint)
        add("evaluate champion", measured, gate)
        if not config.from_scratch:
            # The champion's own shape is known once it has been fetched.
            parent = known_champion(context, current)
            shape = parent.drafter if parent else None
    tokens = 0 if config.traces else chosen.num_answers * (config.generate.max_new_tokens or 0)
    all_tokens = tokens + chosen.text_bytes // _BYTES_PER_TOKEN_OF_TEXT
    taps = len((shape or prepared.shape).target_layer_ids)
    feature_bytes = all_tokens * extract.bytes_per_token(context, taps)
    if config.traces:
        generated = traces.plan(context, chosen)
        add("traces", generated, f"{chosen.num_train:,} logged answers")
    else:
        generated = generate.plan(context, chosen.train_fingerprint)
        add("generate", generated, f"{chosen.num_answers:,} answers, at most {tokens:,} tokens")
    corpus: Plan | None = generated
    if config.select.fraction is not None and select.kept_whole(config, current) is None:
        unknown = current is not None and config.select.by == "draft" and parent is None
        corpus = None if unknown else select.plan(context, generated.identity, parent)
        add("select", corpus, f"{config.select.fraction:.0%} of the answers' tokens, by {config.select.by}")
    extracted = extract.plan(context, corpus.identity, shape.target_layer_ids) if shape and corpus else None
    add("extract", extracted, f"at most {feature_bytes / 1e6:,.1f} MB")
    trained = train.plan(context, extracted.identity, shape, parent) if shape and extracted else None
    duration = f"{config.train.epochs} epochs" if config.train.epochs else f"{config.train.steps} steps"
    start = "the champion" if current and not config.from_scratch else _STARTS[config.drafter.init]
    add("train", trained, f"{duration}, from {start}")
    add("evaluate candidate", None, gate)
    add("gate", None, "report")
    return DryRun(
        target_path=str(context.checkpoint.path),
        target_fingerprint=context.checkpoint.fingerprint,
        model_name=registry.name,
        champion_version=current.version if current else None,
        settled=done.outcome.value if done else None,
        mask_token=prepared.mask_token.reason,
        tokens=tokens,
        feature_bytes=feature_bytes,
        stages=tuple(stages),
    )
