"""What the pages show: families, their drafter versions, who serves which target, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from dflash_core import tags as t
from dflash_core.fingerprint import SHORT
from dflash_core.tags import ServeEntry
from dflash_core.types import Interval


def target_name(path: str, fingerprint: str) -> str:
    """What people call a checkpoint: the last part of its path."""
    return path.rstrip("/").rpartition("/")[2] or fingerprint[:SHORT]


@dataclass(frozen=True)
class Decision:
    """One finished realignment, whatever came of it."""

    run_id: str
    family: str
    outcome: str
    reason: str
    target_fingerprint: str
    target_path: str
    at: datetime
    seconds: float
    """Sum over the stages."""
    champion: Interval | None
    """τ of the drafter that served before, on this target; None for a first drafter."""
    candidate: Interval | None
    """τ of the newly trained drafter; None if nothing was trained."""
    champion_version: str
    drafter_version: str
    """The version that this run made or certified; empty if it made none."""

    @property
    def target_name(self) -> str:
        return target_name(self.target_path, self.target_fingerprint)

    @property
    def serves(self) -> Interval | None:
        """τ of what serves the target after the decision."""
        return self.candidate if self.outcome == "promoted" else self.champion


@dataclass(frozen=True)
class Version:
    """One registered drafter."""

    number: int
    aliases: tuple[str, ...]
    drafter_fingerprint: str
    block_size: str
    parent: str
    target_fingerprint: str
    target_path: str
    tau: Interval | None
    """As measured by its gate, on the target that it was trained for."""
    outcome: str
    created: datetime
    run_id: str
    serves: Mapping[str, ServeEntry]

    @property
    def target_name(self) -> str:
        return target_name(self.target_path, self.target_fingerprint)


@dataclass(frozen=True)
class Serving:
    """A target and the version that serves it now."""

    entry: ServeEntry
    version: int

    @property
    def target_name(self) -> str:
        return target_name(self.entry["target_path"], self.entry["target_fingerprint"])

    @property
    def tau(self) -> Interval:
        return Interval(self.entry["tau"], self.entry["tau_low"], self.entry["tau_high"])


@dataclass(frozen=True)
class Family:
    """One registered model: all drafters for the checkpoints of one target."""

    name: str
    versions: tuple[Version, ...]
    """Newest first, as `decisions`."""
    decisions: tuple[Decision, ...]

    def with_alias(self, alias: str) -> Version | None:
        return next((version for version in self.versions if alias in version.aliases), None)

    @property
    def champion(self) -> Version | None:
        return self.with_alias(t.CHAMPION)

    @property
    def challenger(self) -> Version | None:
        return self.with_alias(t.CHALLENGER)

    @property
    def servings(self) -> tuple[Serving, ...]:
        """Newest first. The alias says that a version serves a target, its tag which target that is."""
        found = [
            Serving(entry, version.number)
            for version in self.versions
            for fingerprint, entry in version.serves.items()
            if t.TARGET_PREFIX + fingerprint[:SHORT] in version.aliases
        ]
        return tuple(sorted(found, key=lambda serving: serving.entry["at"], reverse=True))
