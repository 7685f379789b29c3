"""The drafter that serves now: fetched from the registry, verified, and kept in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_core import tags as t
from dflash_core.models.drafter_config import DrafterConfig, read_drafter_config
from dflash_core.store.artifacts import Artifact, Workspace
from pipelines.context import Context
from pipelines.evaluate import Subject
from pipelines.plan import Plan
from pipelines.registry import RegisteredDrafter, Registry

CODE_VERSION = 1


@dataclass(frozen=True)
class Champion:
    """A registered drafter, at hand on disk."""

    registered: RegisteredDrafter
    artifact: Artifact
    """Holds it in `drafter/`."""
    drafter: DrafterConfig

    @property
    def fingerprint(self) -> str:
        return self.registered.drafter_fingerprint

    @property
    def promised_tau(self) -> float:
        """What the gate measured when this drafter was promoted."""
        return float(self.registered.tags[t.TAU])

    @property
    def promised_target(self) -> str:
        """Fingerprint of the target on which the gate measured that; "" where the registry does not say."""
        return self.registered.tags.get(t.TARGET_FINGERPRINT, "")

    @property
    def subject(self) -> Subject:
        return Subject("champion", self.artifact, self.fingerprint, self.drafter.block_size)


def plan(registered: RegisteredDrafter) -> Plan:
    """A download depends on what is downloaded alone."""
    return Plan("champion", {"drafter": registered.drafter_fingerprint}, CODE_VERSION)


def fetch_champion(context: Context, registry: Registry, registered: RegisteredDrafter) -> Champion:
    """Download a registered drafter (once per store). Raises UserError if its files do not match."""

    def body(workspace: Workspace) -> dict[str, Any]:
        with workspace.scratch() as scratch:
            directory = registry.download(registered.version, scratch / "drafter")
            for path in sorted(p for p in directory.rglob("*") if p.is_file()):
                workspace.put(f"drafter/{path.relative_to(directory)}", path)
        return {"model": registered.name, "version": registered.version}

    return _champion(registered, plan(registered).run(context, body).artifact)


def known_champion(context: Context, registered: RegisteredDrafter) -> Champion | None:
    """The same, but only if it has been fetched before."""
    artifact = context.store.artifact("champion", plan(registered).identity)
    return None if artifact is None else _champion(registered, artifact)


def _champion(registered: RegisteredDrafter, artifact: Artifact) -> Champion:
    return Champion(registered, artifact, read_drafter_config(artifact.local_dir() / "drafter"))
