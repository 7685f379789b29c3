"""Clear a store of outputs that no registered drafter and no running job needs.

Everything is looked at before anything is removed; what is removed goes under its own lease, so a job that
begins meanwhile either finds an output whole or makes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_core.errors import LeaseHeldError, UserError
from dflash_core.fingerprint import SHORT
from dflash_core.store.artifacts import Store
from dflash_core.store.lease import live_keys
from dflash_core.store.retention import NOTES, RECENT, Decision, Entry, Kind, Policy, Served, decide
from dflash_core.store.storage_errors import explained
from dflash_core.store.store_contents import USED, clock, contents, remove
from dflash_core.tracking import DEFAULT_TRACKING_URI, display_uri, resolve_tracking_uri
from pipelines.prune_config import PruneConfig
from pipelines.ray_job import stable_folder
from pipelines.served import served_drafters
from pipelines.telemetry import bytes_text, progress, say


@dataclass(frozen=True)
class Pruning:
    """What becomes of every entry of a store."""

    store: str
    decisions: tuple[Decision, ...]
    now: float
    deleted: bool
    """Whether it was done, and not only shown."""
    registries: tuple[str, ...] = ()
    """Those that were asked, as they may be shown."""
    keep_bytes: int | None = None
    """What the store was to hold at most."""

    @property
    def removed_bytes(self) -> int:
        return sum(d.entry.num_bytes for d in self.decisions if d.removed)

    @property
    def kept_bytes(self) -> int:
        return sum(d.entry.num_bytes for d in self.decisions if not d.removed)

    @property
    def over_bytes(self) -> int:
        """What the store still holds above `keep_bytes`."""
        return 0 if self.keep_bytes is None else max(0, self.kept_bytes - self.keep_bytes)

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "store": self.store,
            "deleted": self.deleted,
            "removed_bytes": self.removed_bytes,
            "kept_bytes": self.kept_bytes,
            "over_bytes": self.over_bytes,
            "registries": list(self.registries),
            "entries": [
                {
                    "stage": d.entry.stage,
                    "identity": d.entry.identity,
                    "name": d.entry.name,
                    "kind": d.entry.kind.value,
                    "bytes": d.entry.num_bytes,
                    "age_seconds": None if d.entry.used == 0 else round(self.now - d.entry.used, 1),
                    "removed": d.removed,
                    "why": d.why,
                }
                for d in self.decisions
            ],
        }

    def text(self) -> str:
        """A table for people, and what it comes to."""
        verb = "removed" if self.deleted else "would remove"
        rows = [("stage", "identity", "age", "bytes", "", "why"), *map(self._row, self.decisions)]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[5]
            for row in rows
        ]
        total = f"{verb} {bytes_text(self.removed_bytes)}, keeping {bytes_text(self.kept_bytes)}"
        hint = "" if self.deleted or not self.removed_bytes else "; pass --delete to do it"
        return "\n".join([*lines, total + hint, *self._notes()])

    def _notes(self) -> Iterator[str]:
        if self.over_bytes:
            recent = sum(d.entry.num_bytes for d in self.decisions if not d.removed and d.why == RECENT)
            reasons = [(self.kept_bytes - recent, "is needed"), (recent, "was used within the hour")]
            why = " and ".join(f"{bytes_text(count)} {reason}" for count, reason in reasons if count)
            yield f"still {bytes_text(self.over_bytes)} over --keep-bytes, since {why}"
        for number, uri in enumerate(self.registries, 1):
            yield f"registry{_mark(number, len(self.registries))}: {uri}"

    def _row(self, decision: Decision) -> tuple[str, ...]:
        entry = decision.entry
        kind = "" if entry.kind is Kind.ARTIFACT else f" {entry.kind}"
        age = "?" if entry.used == 0 else age_text(self.now - entry.used)
        verdict = "remove" if decision.removed else "keep"
        size = bytes_text(entry.num_bytes)
        return entry.stage, entry.identity[:SHORT] + kind, age, size, verdict, decision.why


def age_text(seconds: float) -> str:
    """`45s`, `12m`, `3.5h`, `20d`: in the largest unit of which there is one."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f}".removesuffix(".0") + unit
    return f"{max(0, int(seconds))}s"


def prune(config: PruneConfig, *, delete: bool) -> Pruning:
    """Decide on every entry of the store, and with `delete` remove what may go.

    Raises UserError if nothing says what may go, if there is no store, if a registry that it was used
    with cannot be asked, or if a running job does not say what it reads.
    """
    if config.older_than is None and config.keep_bytes is None:
        raise UserError("nothing says what may go; pass --older-than 14d, --keep-bytes 500GB, or both")
    store = _open(config.store)
    with explained(store.location):
        live, now = live_keys(store.folder), clock(store.folder)
        entries = contents(store)
        _refuse_no_store(store, entries)
        _refuse_unknown(entries, live)
        registries = _registries(config, entries)
        served = list(_served(registries))
        decisions = decide(entries, served, live, Policy(config.seconds, config.bytes), now)
        if delete:
            decisions = list(_removing(store, decisions))
    shown = tuple(display_uri(uri) for uri in registries)
    return Pruning(store.location, tuple(decisions), now, delete, shown, config.bytes)


def _served(registries: list[str]) -> Iterator[Served]:
    for number, uri in enumerate(registries, 1):
        for drafter in served_drafters(uri):
            yield replace(drafter, name=drafter.name + _mark(number, len(registries)))


def _mark(number: int, count: int) -> str:
    """Which of several registries; nothing where there is one."""
    return f" [{number}]" if count > 1 else ""


def _removing(store: Store, decisions: list[Decision]) -> Iterator[Decision]:
    """The decisions as they came out; those that were overtaken are kept."""
    with progress("prune", sum(d.removed for d in decisions), "entries") as bar:
        for decision in decisions:
            if not decision.removed:
                yield decision
                continue
            try:
                gone = remove(store, decision.entry)
                yield decision if gone else Decision(decision.entry, False, "used meanwhile")
            except LeaseHeldError:
                yield Decision(decision.entry, False, "a live run is at it")
            bar.advance(1, bytes=decision.entry.num_bytes)


def _open(location: str) -> Store:
    if "://" not in location:
        path = Path(location)
        location = str(path if path.is_absolute() else stable_folder() / path)
        if not Path(location).is_dir():
            raise UserError(f"there is no store at {location}; pass --store")
    return Store.open(location)


def _refuse_no_store(store: Store, entries: list[Entry]) -> None:
    """A store that was cleared whole still has its leases' folder."""
    if not entries and not any(store.folder.sizes(name) for name in ("leases", USED)):
        raise UserError(f"{store.location} is no store: no stage ever left anything there; pass --store")


def _refuse_unknown(entries: list[Entry], live: frozenset[str]) -> None:
    for entry in entries:
        if entry.kind is Kind.PARTIAL and entry.lease_key in live and entry.inputs is None:
            raise UserError(
                f"a run is at {entry.name} that does not say what it reads (it is of an older version); "
                "wait until it has ended"
            )


def _registries(config: PruneConfig, entries: list[Entry]) -> list[str]:
    """Tracking URIs to be asked: the one given, and those whose decisions stand in the store."""
    base = stable_folder()
    noted = {e.inputs.get("registry") for e in entries if e.kind is Kind.ARTIFACT and e.stage in NOTES}
    ignored = {resolve_tracking_uri(uri, base) for uri in config.ignore_registries}
    found = {uri for uri in noted if uri} - ignored
    if config.tracking_uri is not None or not found:
        found.add(resolve_tracking_uri(config.tracking_uri or DEFAULT_TRACKING_URI, base))
    for uri in sorted(found - ignored):
        say(f"asking {display_uri(uri)} which drafters serve")
    return sorted(found - ignored)
