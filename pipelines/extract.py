"""Stage `extract`: hidden features of every sample, in Arrow shards written by the actors themselves."""

from __future__ import annotations

from typing import Any

from dflash_core.store.artifacts import Workspace
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.sharded import Row, work_off
from pipelines.stage import StageResult
from pipelines.telemetry import progress

CODE_VERSION = 3


def plan(context: Context, generate_identity: str, layer_ids: tuple[int, ...]) -> Plan:
    """What the features of decoder layers `layer_ids` depend on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "samples": generate_identity,
        "layer_ids": list(layer_ids),
        "shard_tokens": context.config.extract.shard_tokens,
        "storage": context.config.extract.storage,
        "last_hidden": _last_hidden(context),
        "dtype": context.placement.dtype,
    }
    return Plan("extract", inputs, CODE_VERSION)


def run(context: Context, planned: Plan, generated: StageResult) -> StageResult:
    """Features in `features-NNNNN.arrow`; resumable shard by shard."""
    layer_ids = tuple(planned.inputs["layer_ids"])
    settings = context.config.extract

    def body(workspace: Workspace) -> dict[str, Any]:
        tasks = _tasks(generated, settings.shard_tokens or 65_536)
        num_samples: dict[str, int] = {}
        with progress("extract", generated.artifact.meta["samples"], "samples", context.target_name) as bar:

            def on_row(row: Row, fresh: bool) -> None:
                num_samples[row["name"]] = row["samples"]
                bar.advance(row["samples"], fresh=fresh, tokens=row["tokens"], bytes=row["bytes"])

            totals = work_off(
                workspace,
                "ExtractWorker",
                {
                    "checkpoint": context.checkpoint,
                    "guard": context.guard,
                    "placement": context.placement,
                    "workspace": workspace,
                    "generated": generated.artifact,
                    "kept": {
                        "layer_ids": layer_ids,
                        "storage": settings.storage,
                        "last_hidden": _last_hidden(context),
                    },
                    "batching": {
                        "batch_tokens": settings.batch_tokens,
                        "chunk_tokens": settings.chunk_tokens,
                    },
                },
                tasks,
                context.placement,
                context.connect,
                on_row,
            )
        return {
            **totals.pick("samples", "tokens", "bytes", "seconds"),
            "shards": [task["name"] for task in tasks],
            "shard_samples": [num_samples[task["name"]] for task in tasks],
            "layer_ids": list(layer_ids),
            "peak_mb": totals.peak_mb,
        }

    return planned.run(context, body)


def bytes_per_token(context: Context, num_taps: int) -> int:
    """Of features on the disk; ids, masks and framing add less than a hundredth."""
    hidden = context.checkpoint.config.hidden_size
    per_tap = hidden + 1 if context.config.extract.storage == "compact" else 2 * hidden
    return num_taps * per_tap + (2 * hidden if _last_hidden(context) else 0)


def _last_hidden(context: Context) -> bool:
    """Whether to keep what the target's distribution is recomputed from: if asked, or for the loss."""
    return context.config.extract.last_hidden or context.config.train.loss != "ce"


def _tasks(generated: StageResult, shard_tokens: int) -> list[Row]:
    """One task per run of sample files that together hold about `shard_tokens` tokens.

    Sizes are judged by bytes of JSON (about six per token), so that no file need be read here.
    """
    groups: list[list[str]] = [[]]
    tokens = 0
    for record in generated.artifact.files:
        if not record.name.startswith("samples-"):
            continue
        if groups[-1] and tokens >= shard_tokens:
            groups.append([])
            tokens = 0
        groups[-1].append(record.name)
        tokens += record.num_bytes // 6
    return [{"name": f"features-{i:05d}.arrow", "samples": files} for i, files in enumerate(groups)]
