"""What a realignment came to, for programs (`report.json`) and for people (`report.html`)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_core.decision.gate import one_sentence
from dflash_core.decoding.acceptance import summary_json
from dflash_core.types import AcceptanceReport, GateDecision, Outcome


@dataclass(frozen=True)
class RealignReport:
    """Everything that one realignment measured and decided."""

    outcome: Outcome
    model_name: str
    model_version: int | None
    """None while the registry has not numbered it, and for a rejected drafter."""
    target_path: str
    target_fingerprint: str
    drafter_fingerprint: str
    """Of the drafter that the decision is about."""
    decision: GateDecision
    not_certified: GateDecision | None
    """Why the champion could not stay as it is; None where it was not asked, or could."""
    candidate: AcceptanceReport | None
    """The new drafter; None when nothing was trained."""
    champion: AcceptanceReport | None
    """The drafter that served before, on the new target; None when there was none."""
    stages: tuple[tuple[str, str, float, bool], ...]
    """(name, identity, seconds in this run, found ready-made)."""
    lineage: Mapping[str, str]
    settings: Mapping[str, Any] = field(repr=False)
    mask_token_reason: str
    created_at: str
    """ISO 8601, UTC."""


def write_report(directory: Path, report: RealignReport) -> None:
    """Write `report.json` and `report.html`, which needs no other file, into an existing directory."""
    from dflash_core.decision.report_page import render

    data = json.dumps(to_json(report), indent=2, ensure_ascii=False, allow_nan=False)
    (directory / "report.json").write_text(data + "\n", encoding="utf-8")
    (directory / "report.html").write_text(render(report), encoding="utf-8")


def to_json(report: RealignReport) -> dict[str, Any]:
    """`report` as JSON-able data; the acceptance of both drafters as `acceptance.summary_json` gives it."""
    return {
        "outcome": report.outcome.value,
        "reason": one_sentence(report.decision),
        "created_at": report.created_at,
        "model": {"name": report.model_name, "version": report.model_version},
        "target": {"path": report.target_path, "fingerprint": report.target_fingerprint},
        "drafter_fingerprint": report.drafter_fingerprint,
        "decision": asdict(report.decision),
        "not_certified": asdict(report.not_certified) if report.not_certified else None,
        "candidate": summary_json(report.candidate) if report.candidate else None,
        "champion": summary_json(report.champion) if report.champion else None,
        "stages": [
            {"name": name, "identity": identity, "seconds": seconds, "cached": cached}
            for name, identity, seconds, cached in report.stages
        ],
        "mask_token_reason": report.mask_token_reason,
        "lineage": dict(report.lineage),
        "settings": {name: _plain(value) for name, value in report.settings.items()},
    }


def _plain(value: Any) -> Any:
    """A setting as JSON has it; anything else as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
