"""What of a store may go: which outputs somebody needs, how old the others are, and what room they take.

Pure: what stands in the store (`store_contents`) and what serves (`pipelines.served`) come in, a decision for
every entry goes out.

Needed is

- what a drafter that serves was made of: the `train` output that holds it, and from there upwards through
  features and samples to the prompts. Not its parent's features: the parent itself is in the registry. Nor
  what only shares its gate prompts, or its prompts for another target: every run of a schedule does;
- what the gate measured of it, which certification compares with, and the store's copy of it;
- what a live run is at, and what that run reads;
- `settled`, `budget` and `gate`: a few kilobytes each, and without them a request that was decided long ago
  would be worked off once more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NOTES = frozenset({"settled", "budget", "gate"})
RECENT_SECONDS = 3600.0
"""What was used so short ago is kept: a run between two stages holds no lease."""
RECENT = "used within the hour, which is always kept"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Kind(StrEnum):
    """What an entry of a store is."""

    ARTIFACT = "artifact"
    PARTIAL = "partial"
    """A stage that a run left unfinished, or is at."""
    REMNANT = "remnant"
    """Half removed."""
    DAMAGED = "damaged"
    """Set aside."""


@dataclass(frozen=True)
class Entry:
    """One directory of a store."""

    name: str
    """<stage>/<directory>."""
    stage: str
    identity: str
    kind: Kind
    num_bytes: int
    used: float
    """When it was last needed, in seconds by the storage's clock."""
    inputs: Any = field(default=None, repr=False)
    """What it was made of, where that is known."""
    offers: frozenset[str] = frozenset()
    """What others may name it by: its identity, the fingerprint of the drafter in it."""
    feeds: tuple[tuple[str, frozenset[str]], ...] = ()
    """Of prompts: a stage that reads them, and the fingerprints by which its inputs name them, together."""

    @property
    def lease_key(self) -> str:
        """The lease of whoever makes or removes it."""
        return f"{self.stage}-{self.identity}"


@dataclass(frozen=True)
class Served:
    """A drafter that serves."""

    fingerprint: str
    name: str
    """In words."""
    made_of: frozenset[str]
    """Identities that the registry records of it."""


@dataclass(frozen=True)
class Policy:
    """What of the unneeded goes."""

    older_than: float | None
    """Seconds."""
    keep_bytes: int | None


@dataclass(frozen=True)
class Decision:
    """What becomes of an entry, and why."""

    entry: Entry
    removed: bool
    why: str


def decide(
    entries: Sequence[Entry], served: Sequence[Served], live: frozenset[str], policy: Policy, now: float
) -> list[Decision]:
    """A decision for each of `entries`, in their order. live: keys of the leases that are held."""
    needs = _needs(entries, served, live)
    decisions = {entry.name: _by_age(entry, needs.get(entry.name), policy, now) for entry in entries}
    room = sum(d.entry.num_bytes for d in decisions.values() if not d.removed)
    for entry in sorted(entries, key=lambda e: e.used):
        free_to_go = entry.name not in needs and not _recent(entry, now)
        if policy.keep_bytes is None or room <= policy.keep_bytes:
            break
        if free_to_go and not decisions[entry.name].removed:
            decisions[entry.name] = Decision(entry, True, "nobody needs it and the store is over its bytes")
            room -= entry.num_bytes
    return [decisions[entry.name] for entry in entries]


def _by_age(entry: Entry, need: str | None, policy: Policy, now: float) -> Decision:
    if need is not None:
        return Decision(entry, False, need)
    if entry.kind is Kind.REMNANT:
        return Decision(entry, True, "half removed already")
    if _recent(entry, now):
        return Decision(entry, False, RECENT)
    if policy.older_than is not None and now - entry.used > policy.older_than:
        return Decision(entry, True, "nobody needs it and it is old")
    if policy.older_than is not None:
        return Decision(entry, False, "nobody needs it, but it is not old enough")
    return Decision(entry, False, "nobody needs it, but the store is within its bytes")


def _recent(entry: Entry, now: float) -> bool:
    return entry.kind is not Kind.REMNANT and now - entry.used < RECENT_SECONDS


def _needs(entries: Sequence[Entry], served: Sequence[Served], live: frozenset[str]) -> dict[str, str]:
    """Name of each needed entry -> who needs it."""
    needs: dict[str, str] = {}
    for entry in entries:
        if entry.lease_key in live:
            needs[entry.name] = "a live run is at it"
            _upwards(entries, entry, "a live run needs it", needs)
            # A drafter that it reads is needed, but not what that was made of.
            for other in _read_by(entries, entry):
                needs.setdefault(other.name, "a live run needs it")
    whole = [entry for entry in entries if entry.kind is Kind.ARTIFACT]
    for drafter in served:
        for entry in whole:
            holds = drafter.fingerprint in entry.offers
            if holds or entry.offers & drafter.made_of:
                needs.setdefault(
                    entry.name, f"holds {drafter.name}" if holds else f"{drafter.name} was made of it"
                )
                _upwards(entries, entry, f"{drafter.name} was made of it", needs)
            elif entry.stage == "evaluate" and drafter.fingerprint in _hashes(entry.inputs):
                needs.setdefault(entry.name, f"a measurement of {drafter.name}")
    for entry in whole:
        if entry.stage in NOTES:
            needs.setdefault(entry.name, "says what was decided")
    return needs


def _upwards(entries: Sequence[Entry], start: Entry, reason: str, needs: dict[str, str]) -> None:
    """Everything that `start` was made of, but for other drafters' origins."""
    waiting = [start]
    while waiting:
        for other in _read_by(entries, waiting.pop()):
            if other.stage not in ("train", "champion") and other.name not in needs:
                needs[other.name] = reason
                waiting.append(other)


def _read_by(entries: Sequence[Entry], reader: Entry) -> list[Entry]:
    hashes = set(_hashes(reader.inputs))
    return [
        e for e in entries if e.kind is Kind.ARTIFACT and (e.offers & hashes or _feeds(e, reader, hashes))
    ]


def _feeds(entry: Entry, reader: Entry, hashes: set[str]) -> bool:
    return any(stage == reader.stage and names <= hashes for stage, names in entry.feeds)


def _hashes(value: Any) -> Iterator[str]:
    """Every sha256 in plain data."""
    if isinstance(value, str) and _SHA256.fullmatch(value):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _hashes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _hashes(part)
