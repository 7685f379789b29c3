"""What a request's automatic budget came to the first time, so that a rerun asks for the very same work.

Automatic budgets look at the machine. A night that is continued on another one, or on a cluster that has
grown, would otherwise find none of what is done already.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import ValidationError

from dflash_core.store.artifacts import Store, Workspace
from dflash_core.types import Checkpoint
from pipelines.config import RealignConfig
from pipelines.context import Context
from pipelines.placement import Placement
from pipelines.plan import Plan
from pipelines.settled import NOT_THE_REQUEST

CODE_VERSION = 1
_SECTIONS = ("generate", "extract", "drafter", "train", "evaluate", "gate")


def plan(config: RealignConfig, checkpoint: Checkpoint, placement: Placement) -> Plan:
    """What was asked for, by a `config` whose automatic fields are still open."""
    inputs = {
        "target": checkpoint.fingerprint,
        "device": placement.device,
        "config": config.model_dump(mode="json", exclude=NOT_THE_REQUEST),
    }
    return Plan("budget", inputs, CODE_VERSION)


def recall(store: Store, asked: Plan, config: RealignConfig) -> RealignConfig | None:
    """`config` with the fields that an earlier run of this request filled in; None if there was none."""
    artifact = store.artifact(asked.name, asked.identity)
    if artifact is None:
        return None
    try:
        filled = {name: type(getattr(config, name))(**artifact.meta[name]) for name in _SECTIONS}
    except (KeyError, TypeError, ValidationError):  # another version of this software wrote it
        return None
    return config.model_copy(update=filled)


def keep(context: Context, asked: Plan) -> None:
    """Remember the budget in `context.config`, unless one is remembered already."""

    def body(_workspace: Workspace) -> dict[str, Any]:
        return {name: getattr(context.config, name).model_dump(mode="json") for name in _SECTIONS}

    asked.run(dataclasses.replace(context, on_event=lambda _event: None), body)
