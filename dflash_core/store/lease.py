"""A lease on a piece of work: one live run at a time, and none that outlives its owner.

The lease is a file `leases/<key>.json`, created exclusively, that names its owner; beside it the owner's
heartbeat, a file of its own so that a late beat can never overwrite a successor's lease. A lease is stale,
and taken over, when

- its owner's process on this machine is dead (or another process has its number by now), or
- its owner is on another machine and its heart has not beaten for a minute. That age is the difference of
  two modification times given by the storage itself, so no machine's clock takes part in it.

On a local folder a kernel lock keeps contenders apart while they look, take over and commit. Remote
storage and filesystems without locks have no such thing: two contenders for a *stale* lease can then both
believe that they have it, until the loser finds the other's name in it, at the latest when it commits.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote, unquote

from dflash_core.errors import LeaseHeldError
from dflash_core.fingerprint import SHORT, fingerprint
from dflash_core.store.folder import Folder

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_POLL_SECONDS = 0.2
_GUARD = "leases/.lock"
_MAX_NAME = 150
"""Characters of a file's name, which most filesystems end at 255."""
_held_here: set[str] = set()
"""Tokens of this process's leases: one whose file could not be removed is not held for ever."""


@dataclass(frozen=True)
class Owner:
    """Who holds a lease."""

    host: str
    machine: str
    """Where `pid` means something: one boot and one container of a host."""
    pid: int
    started: str
    """When the process started, in the kernel's own units; empty if it cannot be told."""
    token: str
    """Names this one holding of the lease."""
    since: str
    """UTC, for people."""

    @classmethod
    def here(cls) -> Owner:
        """This process, with a new token."""
        return cls(
            host=platform.node(),
            machine=_machine(),
            pid=os.getpid(),
            started=_process_start(os.getpid()) or "",
            token=uuid.uuid4().hex,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    @classmethod
    def parse(cls, data: bytes) -> Owner | None:
        """None if a killed writer left half of it."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def is_dead(self) -> bool | None:
        """Whether the holder has ended; None if that cannot be seen from this machine."""
        if self.machine != _machine():
            return None
        if self.pid == os.getpid():
            return self.token not in _held_here
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # alive, and another user's
        return _process_start(self.pid) not in (None, self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class Lease:
    """Holds `key` while its `with` block runs; the heart beats in a thread of its own.

    Entering raises LeaseHeldError when a live owner does not let go within `timeout` seconds.
    """

    taken_over_from: str | None = None
    """Whose stale lease this was, in words."""

    def __init__(self, folder: Folder, key: str, *, timeout: float = 0.0) -> None:
        self.key, self.owner = key, Owner.here()
        self._folder, self._timeout = folder, timeout
        self._file = f"leases/{_file_name(key)}.json"
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def __enter__(self) -> Lease:
        # Before the file names us: another thread must not find a holder that nobody knows.
        _held_here.add(self.owner.token)
        deadline = time.monotonic() + self._timeout
        while (holder := self._try()) is not None:
            if time.monotonic() >= deadline:
                raise LeaseHeldError(
                    f"{self.key} is being worked on by {holder}: wait for it to end, or stop it, and rerun "
                    f"(if it is dead already, its lease lapses after {STALE_SECONDS:.0f} seconds)"
                )
            time.sleep(_POLL_SECONDS)
        self._heart = threading.Thread(target=self._beat, name=f"lease {self.key}", daemon=True)
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        _held_here.discard(self.owner.token)
        if self._heart is not None:
            self._heart.join()
        # A lease that could not be removed lapses by itself: no reason to fail finished work.
        with contextlib.suppress(OSError), self._folder.guard(_GUARD):
            if self.is_ours():
                self._remove(self.owner)

    def is_held(self) -> bool:
        """Whether a live owner, as far as can be seen from here, holds it."""
        return self._folder.exists(self._file) and not self._is_stale(self._read_owner(), guarded=False)

    def is_ours(self) -> bool:
        """Whether nobody took the lease over."""
        return self._folder.read(self._file) == self.owner.encode()

    def check(self) -> None:
        """Raises LeaseHeldError if somebody took the lease over."""
        if not self.is_ours():
            raise LeaseHeldError(
                f"{self.key} was taken over by {self._describe(self._read_owner())} while this run was "
                "not heard of: its work is left to that run, whose result a rerun will find"
            )

    @contextlib.contextmanager
    def confirmed(self) -> Iterator[None]:
        """`check`, and then a block in which nobody can take it over, as far as the storage has locks."""
        with self._folder.guard(_GUARD):
            self.check()
            yield

    def _try(self) -> str | None:
        """Take the lease, or say who holds it."""
        stale = None
        with self._folder.guard(_GUARD) as guarded:
            if self._folder.exists(self._file):
                owner = self._read_owner()
                if not self._is_stale(owner, guarded):
                    return self._describe(owner)
                stale = self._describe(owner)
                self._remove(owner)
            # Without a lock others may create at this very moment, or have removed what we created.
            if not self._folder.create(self._file, self.owner.encode()) or not self.is_ours():
                return self._describe(self._read_owner())
        self.taken_over_from = stale
        return None

    def _is_stale(self, owner: Owner | None, guarded: bool) -> bool:
        if owner is None and guarded:
            return True  # half a file, and its writer no longer has the lock
        dead = owner.is_dead() if owner else None
        return self._silent_seconds(owner) > STALE_SECONDS if dead is None else dead

    def _silent_seconds(self, owner: Owner | None) -> float:
        """Time since the last sign of life, by the storage's clock; 0 if it keeps no times."""
        clock = f"leases/.clock-{self.owner.token}"
        self._folder.touch(clock)
        now = self._folder.modified(clock)
        self._folder.remove(clock)
        signs = [self._folder.modified(self._file)]
        if owner is not None:
            signs.append(self._folder.modified(self._beats_of(owner)))
        last = max((sign for sign in signs if sign is not None), default=None)
        return 0.0 if now is None or last is None else now - last

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # Storage that stumbles must not silence the heart for ever, and each backend has its own errors.
            with contextlib.suppress(Exception):
                if not self.is_ours():
                    return
                self._folder.touch(self._beats_of(self.owner))

    def _read_owner(self) -> Owner | None:
        data = self._folder.read(self._file)
        return None if data is None else Owner.parse(data)

    def _remove(self, owner: Owner | None) -> None:
        self._folder.remove(self._file)
        if owner is not None:
            self._folder.remove(self._beats_of(owner))

    def _beats_of(self, owner: Owner) -> str:
        return f"{self._file}.{owner.token}.beat"

    def _describe(self, owner: Owner | None) -> str:
        return str(owner) if owner else f"an unknown run, see {self._folder.location}/{self._file}"


def live_keys(folder: Folder) -> frozenset[str]:
    """Keys of the leases whose owners are alive, or may be."""
    names = [name for name in folder.sizes("leases") if name.endswith(".json")]
    leases = [Lease(folder, unquote(name.removesuffix(".json"))) for name in names]
    return frozenset(lease.key for lease in leases if lease.is_held())


def _file_name(key: str) -> str:
    name = quote(key, safe="")
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}-{fingerprint(key)[:SHORT]}"


def _machine() -> str:
    """Identity of the boot and of the process namespace; the host's name where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _process_start(pid: int) -> str | None:
    """Start time in clock ticks since boot; "ended" for one not yet reaped; None if it cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
