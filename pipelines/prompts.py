"""Stage `prompts`: draw the prompts to train on and those to gate on; the same for every target.

Its artifact: `train-NNNNN.jsonl`, `gate.jsonl` and `contamination.jsonl`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.prompts.prompt_choice import PromptRequest, check_gate_size, choose
from dflash_core.prompts.prompt_files import shipped_path
from dflash_core.prompts.sources import open_sources
from dflash_core.store.artifacts import Workspace
from pipelines.config import RealignConfig
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.stage import StageResult
from pipelines.telemetry import progress, say

CODE_VERSION = 2
"""2: files that changed under the reading are refused; before, what was read of them was kept."""


@dataclass(frozen=True)
class Chosen:
    """What was drawn."""

    num_train: int
    num_gate: int
    num_answers: int
    """Turns of all training prompts."""
    text_bytes: int
    """Of all training prompts."""
    train_fingerprint: str
    gate_fingerprint: str

    @classmethod
    def of(cls, meta: dict[str, Any]) -> Chosen:
        return cls(**{name: meta[name] for name in cls.__dataclass_fields__})


def prompt_request(
    config: RealignConfig, cache_dir: Path | None, *, automatic_size: bool = False
) -> PromptRequest:
    """The prompts that the config names, or the shipped ones. Raises UserError if a source is not there.

    With training prompts of the user's but no gate prompts, a share of them is held out. automatic_size:
    nobody asked for just so many training prompts, so that the sources' shares count for more.
    """
    own = config.traces or config.prompts
    train = own or (str(shipped_path("train")),)
    gate = config.eval_prompts or (() if own else (str(shipped_path("gate")),))
    return PromptRequest(
        train=open_sources(train, cache_dir, traces=bool(config.traces)),
        gate=open_sources(gate, cache_dir),
        held_out_share=config.evaluate.held_out_share,
        num_train=config.generate.num_prompts,
        num_gate=config.evaluate.num_prompts,
        seed=config.seed,
        thinking=config.generate.thinking,
        keep_shares=automatic_size,
    )


def plan(request: PromptRequest) -> Plan:
    """What the choice depends on; no target."""
    return Plan("prompts", request.identity, CODE_VERSION)


def run(context: Context, request: PromptRequest) -> StageResult:
    """The prompts, drawn or found. Raises UserError if they are too few to gate on."""

    def body(workspace: Workspace) -> dict[str, Any]:
        with workspace.scratch() as scratch:
            return _choose(context.config, request, scratch, workspace.put)

    result = plan(request).run(context, body)
    least = context.config.gate.min_prompts
    check_gate_size(result.artifact.meta["num_gate"], least, request)
    return result


def look(context: Context, request: PromptRequest) -> Chosen:
    """What `run` gives, without leaving a trace: `--dry-run` makes no store."""
    planned = plan(request)
    artifact = context.store.artifact(planned.name, planned.identity)
    if artifact is not None:
        return Chosen.of(artifact.meta)
    with tempfile.TemporaryDirectory(prefix="dflash-prompts-") as scratch:
        return Chosen.of(_choose(context.config, request, Path(scratch), lambda _name, file: file.unlink()))


def _choose(
    config: RealignConfig, request: PromptRequest, scratch: Path, put: Callable[[str, Path], object]
) -> dict[str, Any]:
    with progress("prompts", None, "row reads") as bar:
        return choose(request, scratch, put, min_gate=config.gate.min_prompts, advance=bar.advance, say=say)
