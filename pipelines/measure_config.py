"""MeasureConfig: everything `jobs/evaluate.py` can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from pipelines.config import Section, as_sources


class MeasureConfig(Section):
    """One measurement."""

    target: str = Field(min_length=1)
    """Checkpoint that verifies: a directory or a hub id."""
    drafter: Path
    """Drafter directory in the published DFlash layout."""
    prompts: tuple[str, ...] | None = Field(None, min_length=1)
    """Prompts: a file, folder or hub id (see above); unset: the shipped gate prompts."""
    num_prompts: int | None = Field(None, ge=1)
    """Prompts measured, from the top of each source in turn; unset: all."""
    thinking: Literal["default", "on", "off", "both"] = "default"
    """What the chat template is told of prompts that don't say themselves; a domain each."""
    max_new_tokens: int = Field(128, ge=2)
    """Longest answer, in tokens."""
    temperature: float = Field(0.0, ge=0.0, le=10.0)
    """Sampling temperature; 0 is greedy, and every answer is checked against the target's own choice."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of the sampling."""
    chat_template: Path | None = None
    """Chat template file for a target that has none; unset: the target's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the models run."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the models; auto: bfloat16 on a GPU, float32 on CPUs."""
    threads: int | None = Field(None, ge=1)
    """Torch threads; unset: one per CPU core."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return as_sources(value)
