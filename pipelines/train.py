"""Stage `train`: the drafter learns the new target's answers, through Ray Train.

Warm-started from the champion where there is one, else begun as the target's own layers. Checkpoints
carry the optimizer, so a killed training continues on the very path that it was on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash_core.store.artifacts import Artifact, Workspace
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.pool import release_actors
from pipelines.stage import StageResult
from pipelines.telemetry import peak_rss_mb, progress, say

if TYPE_CHECKING:
    from dflash_core.models.drafter import Drafter
    from dflash_core.models.drafter_config import DrafterConfig
    from dflash_core.training.trainer import StepReport, Trainer

CODE_VERSION = 2
_REPORT_EVERY = 10
"""Steps between two messages from the worker to the driver."""


class Parent(Protocol):
    """The drafter that training starts from; `champion.Champion` is one."""

    @property
    def artifact(self) -> Artifact: ...

    @property
    def fingerprint(self) -> str: ...


def plan(context: Context, extract_identity: str, drafter: DrafterConfig, parent: Parent | None) -> Plan:
    """What the trained drafter depends on."""
    inputs = {
        "features": extract_identity,
        "drafter": drafter.to_json(),
        "init": context.config.drafter.init if parent is None else None,
        "parent": parent.fingerprint if parent else None,
        "dtype": context.placement.dtype,
        "seed": context.config.seed,
        "options": context.config.train.model_dump(exclude={"num_workers"}),
    }
    return Plan("train", inputs, CODE_VERSION)


def run(
    context: Context,
    planned: Plan,
    extracted: StageResult,
    drafter: DrafterConfig,
    parent: Parent | None,
) -> StageResult:
    """`drafter/` in the published format and `curve.json`; resumable by checkpoint."""
    options = _options(context, extracted, parent)
    steps = options["schedule"]["steps"]

    def body(workspace: Workspace) -> dict[str, Any]:
        context.connect()
        if not context.placement.keep_actors:
            release_actors()
        from pipelines.ray_train import run_training

        job = {
            "extracted": extracted.artifact,
            "target_path": str(context.checkpoint.path),
            "target_fingerprint": context.checkpoint.fingerprint,
            "drafter": drafter,
            "init": context.config.drafter.init,
            "parent": None if parent is None else parent.artifact,
            "options": options,
            # By default often enough for a short training too.
            "checkpoint_every": context.config.train.checkpoint_every
            or max(_REPORT_EVERY, min(100, steps // 8)),
            "guard": context.guard,
            "placement": context.placement,
            "workspace": workspace,
        }
        with progress("train", steps, "steps", context.target_name) as bar:
            last = run_training(
                train_worker,
                job,
                num_workers=context.config.train.num_workers,
                use_gpu=context.placement.device == "cuda",
                storage_path=workspace.location,
                name="ray_train",
                on_report=_advancer(bar),
            )
        return {
            "options": options,
            "parent": parent.fingerprint if parent else None,
            "peak_mb": last.get("peak_mb", 0),
            "held_out_tau": last.get("held_out_tau"),
            "held_out_proxy_tau": last.get("held_out_proxy_tau"),
        }

    return planned.run(context, body)


def _options(context: Context, extracted: StageResult, parent: Parent | None) -> dict[str, Any]:
    """`trainer.TrainOptions` as plain data, epochs turned into steps."""
    train, tokens = context.config.train, extracted.artifact.meta["tokens"]
    batch_tokens = train.batch_tokens or 4096
    steps = train.steps
    if steps is None:
        steps = max(1, round((train.epochs or 1) * tokens / batch_tokens))
    return {
        "schedule": {
            "kind": train.schedule,
            "steps": steps,
            "warmup_fraction": train.warmup_fraction,
            "decay_fraction": train.decay_fraction,
        },
        "batch_tokens": batch_tokens,
        "micro_tokens": train.micro_tokens,
        "anchors_per_sequence": train.anchors_per_sequence or 512,
        "anchors": train.anchors,
        "chain_epochs": train.chain_epochs,
        "objective": {"loss": train.loss, "weights": train.weights, "gamma": train.gamma},
        "optimizer": train.optimizer,
        # A drafter that starts from nothing has no part that could stay as it is.
        "mode": "full" if parent is None else train.mode,
        "lora_rank": train.lora_rank,
        "learning_rate": train.learning_rate,
        "clip_norm": train.clip_norm,
        "weight_decay": train.weight_decay,
        "patience": train.patience,
        "seed": context.config.seed,
    }


def _advancer(bar: Any) -> Callable[[dict[str, Any]], None]:
    """Moves the bar to the step that a report names; a resumed run starts where it was."""
    seen = 0

    def advance(metrics: dict[str, Any]) -> None:
        nonlocal seen
        if (kept := metrics["step"] - metrics["fresh_steps"]) > seen:
            say(f"train: goes on from step {kept}")
            bar.advance(kept - seen, fresh=False)
            seen = kept
        shown = {key: metrics[key] for key in ("loss", "proxy_tau", "held_out_tau") if key in metrics}
        bar.advance(metrics["step"] - seen, **shown)
        seen = metrics["step"]

    return advance


def train_worker(job: dict[str, Any]) -> None:
    """What one Ray Train worker does, from loading to the last checkpoint."""
    import torch

    from dflash_core.features.feature_shards import FeatureSet
    from dflash_core.models.target_weights import frozen_pair
    from dflash_core.training.objective import Objective
    from dflash_core.training.schedules import Schedule
    from dflash_core.training.trainer import TrainOptions
    from pipelines.placement import torch_dtype
    from pipelines.ray_reducer import RayReducer

    placement = job["placement"]
    torch.set_num_threads(placement.train_threads)
    options = dict(job["options"])
    options["objective"] = Objective(**options["objective"])
    options["schedule"] = Schedule(**options["schedule"])
    extracted: Artifact = job["extracted"]
    shards = [extracted.local(name) for name in extracted.meta["shards"]]
    rows = FeatureSet(shards, extracted.meta["shard_samples"])
    embedding, head = frozen_pair(
        Path(job["target_path"]), device=placement.device, dtype=torch_dtype(placement.dtype)
    )
    job["guard"].check()
    drafter = _starting_drafter(job, seed=options["seed"]).to(placement.device)
    from dflash_core.training.trainer import Trainer

    trainer = Trainer(drafter, embedding, head, rows, TrainOptions(**options), RayReducer())
    curve = _resume(trainer)
    _walk(trainer, curve, job)


def _starting_drafter(job: dict[str, Any], seed: int) -> Drafter:
    from dflash_core.models.drafter import load_drafter, new_drafter
    from dflash_core.models.target_weights import TargetWeights

    if job["parent"] is not None:
        return load_drafter(job["parent"].local_dir() / "drafter")
    start = TargetWeights(Path(job["target_path"])) if job["init"] == "target" else None
    return new_drafter(job["drafter"], start=start, seed=seed)


def _resume(trainer: Trainer) -> list[dict[str, Any]]:
    """Continue from the last checkpoint if there is one; returns the curve up to it."""
    import ray.train
    import torch

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return []
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", weights_only=True, map_location="cpu")
    trainer.load(state)
    curve: list[dict[str, Any]] = state["curve"]
    return curve


def _walk(trainer: Trainer, curve: list[dict[str, Any]], job: dict[str, Any]) -> None:
    """Train to the end: report every few steps, checkpoint now and then, and leave the drafter."""
    began = saved = trainer.step_index
    recent: list[StepReport] = []
    while not trainer.done:
        recent.append(trainer.step())
        step = trainer.step_index
        if step % _REPORT_EVERY and not trainer.done:
            continue
        point = _average(recent)
        recent = []
        due = step - saved >= job["checkpoint_every"]
        if due or trainer.done:
            point |= _measured(trainer)
        curve.append(point)
        due = due and not trainer.done
        told = {**point, "fresh_steps": step - began}
        _report(told, {**trainer.state(), "curve": curve} if due and trainer.reducer.rank == 0 else None)
        saved = step if due else saved
    if trainer.reducer.rank == 0:
        _leave(trainer, curve, job["workspace"])


def _measured(trainer: Trainer) -> dict[str, float]:
    found = trainer.measure()
    return {} if found is None else {"held_out_tau": found.tau, "held_out_proxy_tau": found.proxy_tau}


def _average(reports: list[StepReport]) -> dict[str, Any]:
    means = ("loss", "proxy_tau", "gradient_norm", "learning_rate")
    point = {key: sum(getattr(r, key) for r in reports) / len(reports) for key in means}
    keys = ("num_tokens", "num_anchors", "skipped")
    sums = {key: sum(getattr(r, key) for r in reports) for key in keys}
    return {"step": reports[-1].step, **point, **sums, "peak_mb": round(peak_rss_mb())}


def _report(point: dict[str, Any], state: dict[str, Any] | None) -> None:
    """Send metrics and, with a state given, a checkpoint (every worker reports; rank 0 attaches)."""
    import tempfile

    import ray.train
    import torch

    if state is None:
        ray.train.report(point)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report(point, checkpoint=ray.train.Checkpoint.from_directory(folder))


def _leave(trainer: Trainer, curve: list[dict[str, Any]], workspace: Workspace) -> None:
    from dflash_core.models.drafter import save_drafter

    with workspace.scratch() as scratch:
        save_drafter(trainer.finish().float(), scratch)
        for name in ("config.json", "model.safetensors"):
            workspace.put(f"drafter/{name}", scratch / name)
    workspace.put_json("curve.json", curve)
    workspace.put_json("options.json", asdict(trainer.options))
