"""What stands in a store, entry by entry, and how one is removed so that half of it is never believed."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from typing import Any

from dflash_core.models.drafter_identity import FILES, drafter_fingerprint
from dflash_core.store.artifacts import Store
from dflash_core.store.folder import Folder
from dflash_core.store.retention import Entry, Kind
from dflash_core.store.workspace import INPUTS, MANIFEST, OWNER, SUCCESS

USED = "used"
"""Folder of empty files whose times say when an artifact was last found and used."""
Feeds = tuple[tuple[str, frozenset[str]], ...]
_DIRECTORY = re.compile(r"([0-9a-f]{64})(\.partial|\.damaged-\d+)?")


def mark_used(store: Store, stage: str, identity: str) -> None:
    """Note that an artifact was used just now. A store that takes no writes is no reason to fail."""
    with contextlib.suppress(Exception):  # each remote backend has errors of its own
        store.folder.touch(f"{USED}/{stage}-{identity}")


def clock(folder: Folder) -> float:
    """The present moment by the storage's own clock."""
    name = f".clock-{uuid.uuid4().hex[:8]}"
    folder.touch(name)
    now = folder.modified(name)
    folder.remove(name)
    if now is None:
        raise ValueError(f"{folder.location} keeps no times, so nothing in it has an age")
    return now


def contents(store: Store) -> list[Entry]:
    """Every entry of the store, by name; one listing, and a few reads for each entry."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for name, size in store.folder.sizes("").items():
        stage, _, rest = name.partition("/")
        directory, _, file = rest.partition("/")
        if file and _DIRECTORY.fullmatch(directory):
            found.setdefault((stage, directory), {})[file] = size
    return [_entry(store.folder, *place, files) for place, files in sorted(found.items())]


def last_used(folder: Folder, entry: Entry) -> float:
    """When an entry was last made, worked on or found, by the storage's clock; 0 where nothing tells."""
    marks = {
        Kind.ARTIFACT: (f"{entry.name}/{SUCCESS}", f"{USED}/{entry.lease_key}"),
        Kind.PARTIAL: (f"{entry.name}/{OWNER}",),
        Kind.DAMAGED: (f"{entry.name}/{MANIFEST}",),
        Kind.REMNANT: (),
    }
    times = (folder.modified(mark) for mark in marks[entry.kind])
    return max((time for time in times if time is not None), default=0.0)


def remove(store: Store, entry: Entry) -> bool:
    """Remove an entry under its lease; False if it was used since it was looked at.

    The marker goes first: what is left when this is killed is no artifact and no workspace, and the next
    prune removes the rest. Raises LeaseHeldError if a live run is at it.
    """
    folder = store.folder
    with store.lease(entry.lease_key) as lease:
        if _kind(entry.name.partition("/")[2], folder.sizes(entry.name)) is not entry.kind:
            return False
        if last_used(folder, entry) > entry.used:
            return False
        with lease.confirmed():
            for mark in (SUCCESS, OWNER):
                folder.remove(f"{entry.name}/{mark}")
        folder.remove_tree(entry.name)
        folder.remove(f"{USED}/{entry.lease_key}")
    return True


def _entry(folder: Folder, stage: str, directory: str, files: dict[str, int]) -> Entry:
    name, kind = f"{stage}/{directory}", _kind(directory, files)
    bare = Entry(name, stage, directory[:64], kind, sum(files.values()), 0.0)
    inputs, offers, feeds = _origin(folder, bare)
    used = last_used(folder, bare)
    return Entry(name, stage, bare.identity, kind, bare.num_bytes, used, inputs, offers, feeds)


def _kind(directory: str, files: dict[str, int]) -> Kind:
    if ".damaged-" in directory:
        return Kind.DAMAGED
    if SUCCESS in files:
        return Kind.ARTIFACT
    return Kind.PARTIAL if OWNER in files else Kind.REMNANT


def _parsed(data: bytes | None) -> dict[str, Any] | None:
    """A note of ours; None where it is missing or damaged, which protects nothing."""
    with contextlib.suppress(ValueError):
        found = json.loads(data or b"")
        return found if isinstance(found, dict) else None
    return None


def _origin(folder: Folder, entry: Entry) -> tuple[Any, frozenset[str], Feeds]:
    """Inputs of an entry, and by what others may name it: `Entry.offers` and `Entry.feeds`."""
    if entry.kind is Kind.PARTIAL:
        return _parsed(folder.read(f"{entry.name}/{INPUTS}")), frozenset(), ()
    if entry.kind is not Kind.ARTIFACT:
        return None, frozenset(), ()
    data = folder.read(f"{entry.name}/{MANIFEST}")
    manifest = _parsed(data) or {}
    inputs = manifest.get("inputs", {})
    offers = {entry.identity}
    if entry.stage == "champion":
        offers.add(inputs.get("drafter"))
    if entry.stage == "train":
        hashes = {record["name"]: record["sha256"] for record in manifest.get("files", ())}
        with contextlib.suppress(KeyError):  # another version of this software made it
            offers.add(drafter_fingerprint({name: hashes[f"drafter/{name}"] for name in FILES}))
    return (
        inputs,
        frozenset(offer for offer in offers if offer),
        _feeds(entry.stage, inputs, manifest.get("meta", {})),
    )


def _feeds(stage: str, inputs: dict[str, Any], meta: dict[str, Any]) -> Feeds:
    """Which stages read these prompts, and the fingerprints that their inputs have of them.

    Gate prompts alone say nothing of whose they are: they stay the same from run to run.
    """
    named: dict[str, tuple[str | None, ...]] = {}
    if stage == "inspect":
        target, train, gate = (inputs.get(name) for name in ("target", "train", "gate"))
        named = {"generate": (target, train), "traces": (target, train), "evaluate": (target, gate)}
    elif stage == "prompts":
        train, gate = meta.get("train_fingerprint"), meta.get("gate_fingerprint")
        named = {"inspect": (train, gate), "traces": (train,)}
    return tuple((reader, frozenset(filter(None, names))) for reader, names in named.items() if all(names))
