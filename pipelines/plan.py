"""A stage before it runs: its name and everything that its output depends on.

Identities are functions of inputs alone, so the whole chain up to the trained drafter is known before
anything runs: that is what `--dry-run` prints and what makes a rerun find its work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_core.store.artifacts import Workspace
from pipelines.context import Context
from pipelines.stage import StageResult, run_stage, stage_identity


@dataclass(frozen=True)
class Plan:
    """One stage to be run or found."""

    name: str
    inputs: dict[str, Any]
    code_version: int

    @property
    def identity(self) -> str:
        return stage_identity(self.name, self.inputs, self.code_version)

    def cached(self, context: Context) -> bool:
        return context.store.artifact(self.name, self.identity) is not None

    def run(self, context: Context, body: Callable[[Workspace], dict[str, Any]]) -> StageResult:
        """Find this stage's output, or make it with `body`; what a killed run finished is kept."""
        return run_stage(
            context.store,
            self.name,
            self.inputs,
            body,
            code_version=self.code_version,
            resumable=True,
            on_event=context.on_event,
        )
