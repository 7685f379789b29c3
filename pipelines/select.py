"""Stage `select`: of the target's answers, keep those that the champion drafts worst (off by default).

It leaves sample files as `generate` does, so that what follows needs not know of it, and beside each a
file that says of every sample its score and whether it was kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.errors import DFlashError
from dflash_core.store.artifacts import Workspace
from dflash_core.store.workspace import row_name
from pipelines.config import RealignConfig
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.sharded import Totals, work_off
from pipelines.stage import StageResult
from pipelines.telemetry import progress, say

if TYPE_CHECKING:
    from dflash_core.corpus.selection import Rank
    from pipelines.champion import Champion
    from pipelines.registry import RegisteredDrafter

CODE_VERSION = 1


def kept_whole(config: RealignConfig, current: RegisteredDrafter | None) -> str | None:
    """Why all answers are kept although a fraction is asked for; None where they are selected."""
    if config.select.by == "random":
        return None
    if current is None:
        return "there is no drafter yet that could tell"
    if config.from_scratch:
        return "the new drafter starts from nothing, whatever the champion knows"
    return None


def plan(context: Context, generate_identity: str, champion: Champion | None) -> Plan:
    """What the selection depends on."""
    options = context.config.select
    inputs: dict[str, Any] = {
        "samples": generate_identity,
        "fraction": options.fraction,
        "by": options.by,
        "seed": context.config.seed,
    }
    if options.by == "draft":
        assert champion is not None
        inputs |= {
            "target": context.checkpoint.fingerprint,
            "drafter": champion.fingerprint,
            "dtype": context.placement.dtype,
            "anchors": options.anchors_per_answer,
        }
    return Plan("select", inputs, CODE_VERSION)


def run(context: Context, generated: StageResult, champion: Champion | None) -> tuple[StageResult, ...]:
    """The stages that make the corpus: `generated`, and the selection from it where one is asked for.

    Resumable shard by shard.
    """
    options = context.config.select
    if options.fraction is None:
        return (generated,)
    reason = kept_whole(context.config, champion.registered if champion else None)
    if reason is not None:
        say(f"select: all answers are kept, since {reason}")
        return (generated,)
    planned = plan(context, generated.identity, champion)
    return generated, planned.run(context, partial(_body, context, generated, champion))


def _body(
    context: Context, generated: StageResult, champion: Champion | None, workspace: Workspace
) -> dict[str, Any]:
    options = context.config.select
    files = [r.name for r in generated.artifact.files if r.name.startswith("samples-")]
    scores = [Path(file).stem.replace("samples", "scores") + ".json" for file in files]
    shared = {"guard": context.guard, "workspace": workspace, "generated": generated.artifact}
    scorer = {
        **shared,
        "checkpoint": context.checkpoint,
        "placement": context.placement,
        "drafter": champion.artifact if champion and options.by == "draft" else None,
        "seed": context.config.seed,
        "most_anchors": options.anchors_per_answer,
        "batch_tokens": context.config.extract.batch_tokens,
    }
    for name in scores:
        # What is read back here must be what was written; a damaged one is made again.
        if workspace.get_json(name) is None:
            workspace.forget(row_name(name))
    with progress("select", generated.artifact.meta["samples"], "samples", context.target_name) as bar:
        scored = work_off(
            workspace,
            "select_workers.ScoreWorker",
            scorer,
            [{"name": name, "samples": file} for name, file in zip(scores, files, strict=True)],
            context.placement,
            context.connect,
            lambda row, fresh: bar.advance(row["samples"], fresh=fresh, tokens=row["tokens"]),
        )
    lowest = _lowest(workspace, scores, options.fraction or 1.0)
    picked = work_off(
        workspace,
        "select_workers.PickWorker",
        {**shared, "lowest": (lowest.score, lowest.tie)},
        [{"name": file, "scores": name} for name, file in zip(scores, files, strict=True)],
        context.placement,
        context.connect,
        lambda _row, _fresh: None,
    )
    return _told(context, scored, picked, lowest)


def scores_of(workspace: Workspace, file: str) -> list[tuple[str, int, float]]:
    """(id, tokens, score) of every sample that a scores file tells of."""
    found: list[tuple[str, int, float]] | None = workspace.get_json(file)
    if found is None:
        raise DFlashError(f"{workspace.location}/{file} was changed or removed meanwhile: run again")
    return found


def _lowest(workspace: Workspace, files: list[str], fraction: float) -> Rank:
    from dflash_core.corpus.selection import Rank, lowest_kept

    def ranks() -> Iterator[tuple[Rank, int]]:
        for file in files:
            for sample_id, tokens, score in scores_of(workspace, file):
                yield Rank.of(sample_id, score), tokens

    return lowest_kept(ranks(), fraction)


def _told(context: Context, scored: Totals, picked: Totals, lowest: Rank) -> dict[str, Any]:
    """What the stage says of itself, and one line of it to the terminal."""
    totals, everything = (each.pick("samples", "tokens", "score") for each in (picked, scored))
    mean, mean_of_all = totals["score"] / totals["samples"], everything["score"] / everything["samples"]
    by = context.config.select.by
    line = f"select: {totals['samples']} of {everything['samples']} answers kept by {by}"
    if by == "draft":
        line += f"; of their drafts the champion gets {mean:.0%} wrong, of all {mean_of_all:.0%}"
    say(line)
    return {
        "samples": totals["samples"],
        "tokens": totals["tokens"],
        "by": by,
        "considered": {"samples": everything["samples"], "tokens": everything["tokens"]},
        "lowest_score": lowest.score,
        "mean_score": mean,
        "mean_score_of_all": mean_of_all,
        "domains": picked["domains"],
        "seconds": scored["seconds"],
        "peak_mb": scored.peak_mb,
    }
