"""Stage `traces`: what serving logged becomes the corpus; nothing is generated, the target is not loaded."""

from __future__ import annotations

from typing import Any

from dflash_core.errors import UserError
from dflash_core.store.artifacts import Workspace
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.prompts import Chosen
from pipelines.sharded import Row, Totals, work_off
from pipelines.stage import StageResult
from pipelines.telemetry import progress, say

CODE_VERSION = 2


def plan(context: Context, chosen: Chosen) -> Plan:
    """What the samples depend on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "stop_ids": list(context.checkpoint.eos_ids),
        "traces": chosen.train_fingerprint,
    }
    return Plan("traces", inputs, CODE_VERSION)


def run(context: Context, drawn: StageResult) -> StageResult:
    """Samples in `samples-NNNNN.jsonl`, one for each `traces-NNNNN.jsonl`; resumable shard by shard.

    Raises UserError if they were served with another template than the target's.
    """
    meta = drawn.artifact.meta

    def body(workspace: Workspace) -> dict[str, Any]:
        first_mismatch = ""

        def on_row(row: Row, fresh: bool) -> None:
            nonlocal first_mismatch
            first_mismatch = first_mismatch or row["first_mismatch"]
            bar.advance(row["traces"], fresh=fresh, tokens=row["tokens"], bytes=row["bytes"])

        with progress("traces", meta["num_train"], "traces", context.target_name) as bar:
            totals = work_off(
                workspace,
                "trace_workers.TraceWorker",
                {
                    "checkpoint": context.checkpoint,
                    "guard": context.guard,
                    "workspace": workspace,
                    "drawn": drawn.artifact,
                },
                [
                    {"name": name.replace("traces-", "samples-"), "traces": name}
                    for name in meta["train_shards"]
                ],
                context.placement,
                context.connect,
                on_row,
            )
        return _meta(context, totals, first_mismatch)

    return plan(context, Chosen.of(meta)).run(context, body)


def _meta(context: Context, totals: Totals, first_mismatch: str) -> dict[str, Any]:
    """What is recorded with the samples. Raises UserError if they are of another template, or none."""
    from dflash_core.corpus.trace_samples import check_mismatches, template_sha256

    check_mismatches(totals["mismatched"], totals["compared"], first_mismatch)
    left_out = totals["left_out"] or {}
    told = ", ".join(f"{count:,} with {reason}" for reason, count in sorted(left_out.items()))
    if told:
        say(f"traces: {sum(left_out.values()):,} of {totals['traces']:,} are left out ({told})")
    if not totals["samples"]:
        raise UserError(f"no trace can be trained on ({told}); log token ids beside the messages")
    return {
        **totals.pick("traces", "samples", "tokens", "seconds", "compared", "mismatched"),
        "left_out": left_out,
        "chat_template_sha256": template_sha256(context.checkpoint),
        "peak_mb": totals.peak_mb,
    }
