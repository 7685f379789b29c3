"""What a person is told while stages run."""

from __future__ import annotations

from pipelines.stage import StageEvent
from pipelines.telemetry import say


def narrate(event: StageEvent) -> None:
    """One line per event of a stage."""
    say(event.message)
