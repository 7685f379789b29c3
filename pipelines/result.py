"""What a realignment gives back: the JSON object of `--json` and the exit code."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_core.errors import ExitCode
from dflash_core.fingerprint import SHORT
from dflash_core.types import Outcome
from pipelines.stage import StageResult

_EXIT_CODES = {
    Outcome.PROMOTED: ExitCode.OK,
    Outcome.CERTIFIED: ExitCode.OK,
    Outcome.REJECTED: ExitCode.REJECTED,
    Outcome.HELD: ExitCode.HELD,
}


@dataclass(frozen=True)
class StageSummary:
    """A stage in a line: `seconds` is what it took in the run that made or found it."""

    name: str
    identity: str
    seconds: float
    cached: bool

    @classmethod
    def of(cls, stage: StageResult) -> StageSummary:
        return cls(stage.name, stage.identity, round(stage.seconds, 3), stage.cached)


@dataclass(frozen=True)
class RealignResult:
    """How a realignment ended."""

    outcome: Outcome
    reason: str
    """One sentence for a person."""
    target_path: str
    target_fingerprint: str
    tau_champion: float | None
    """τ of the drafter that served before, on this target; None when there was none."""
    tau_candidate: float | None
    """τ of the newly trained drafter; None when nothing was trained."""
    model_name: str
    model_version: int | None
    """The version that serves this target (or waits as challenger); None after a rejection."""
    report: str | None
    stages: tuple[StageSummary, ...]
    already_done: bool = False
    """Nothing was left to do: an earlier run had settled this very request."""

    @property
    def exit_code(self) -> ExitCode:
        return _EXIT_CODES[self.outcome]

    def to_json(self) -> dict[str, Any]:
        """The one line that `--json` prints last."""
        return {
            "outcome": self.outcome.value,
            "reason": self.reason,
            "target": {"path": self.target_path, "fingerprint": self.target_fingerprint},
            "tau": {"champion": self.tau_champion, "candidate": self.tau_candidate},
            "model": {"name": self.model_name, "version": self.model_version},
            "report": self.report,
            "already_done": self.already_done,
            "stages": [asdict(stage) for stage in self.stages],
        }

    def text(self) -> str:
        """For a person at a terminal."""
        lines = [f"{self.outcome.value}: {self.reason}"]
        if self.already_done:
            lines.append("nothing to do: this request was settled by an earlier run")
        for name, value in (("champion", self.tau_champion), ("candidate", self.tau_candidate)):
            if value is not None:
                lines.append(f"  τ of the {name} on this target: {value:.2f}")
        lines.append(f"  target   {self.target_path} ({self.target_fingerprint[:SHORT]})")
        if self.model_version is not None:
            lines.append(f"  drafter  models:/{self.model_name}/{self.model_version}")
        if self.report is not None:
            lines.append(f"  report   {self.report}")
        return "\n".join(lines)
