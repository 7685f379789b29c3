"""One live owner at a time, none that is dead: with real processes, some of them killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dflash_core.errors import ExitCode, LeaseHeldError
from dflash_core.store import lease as lease_module
from dflash_core.store.artifacts import Store
from dflash_core.store.lease import Owner

CHILD = Path(__file__).with_name("lease_child.py")
REPOSITORY = Path(__file__).parents[3]


class Contender:
    """A process that takes leases when told to."""

    def __init__(self, store: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        assert self.answer() == "ready"

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def take(self, key: str) -> str:
        self.tell(f"take {key} 0")
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))


@pytest.fixture
def contenders(store: Store) -> Iterator[list[Contender]]:
    found = [Contender(Path(store.location)) for _ in range(3)]
    yield found
    for contender in found:
        contender.kill()


def lease_file(store: Store, key: str) -> Path:
    return Path(store.location, "leases", f"{key}.json")


def plant(store: Store, key: str, owner: Owner, *, silent_seconds: float = 0) -> None:
    """A lease as `owner` would have left it so many seconds ago."""
    file = lease_file(store, key)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(owner.encode())
    then = time.time() - silent_seconds
    os.utime(file, (then, then))


def elsewhere() -> Owner:
    return replace(Owner.here(), host="other-host", machine="another machine")


def test_exactly_one_of_several_processes_gets_a_free_lease(
    store: Store, contenders: list[Contender]
) -> None:
    contend(store, contenders, rounds=60, stale=None)


def test_exactly_one_of_several_processes_takes_over_a_dead_ones_lease(
    store: Store, contenders: list[Contender]
) -> None:
    victim = Contender(Path(store.location))
    assert victim.take("victim") == "held"
    victim.kill()
    contend(store, contenders, rounds=60, stale=lease_file(store, "victim").read_bytes())


def contend(store: Store, contenders: list[Contender], *, rounds: int, stale: bytes | None) -> None:
    winners = set()
    for number in range(rounds):
        key = f"round-{number}"
        if stale is not None:
            lease_file(store, key).write_bytes(stale)
        at = time.monotonic() + 0.003
        for contender in contenders:
            contender.tell(f"take {key} {at}")
        answers = [contender.answer() for contender in contenders]
        assert sorted(a.split()[0] for a in answers) == ["held", "refused", "refused"]
        winner = contenders[answers.index("held")]
        assert json.loads(lease_file(store, key).read_text())["pid"] == winner.process.pid
        assert all(f"process {winner.process.pid} on" in a for a in answers if a != "held")
        winners.add(winner.process.pid)
        winner.tell("drop")
    assert len(winners) > 1, "the rounds were no contest"


def test_a_held_lease_names_its_owner_and_the_remedy(store: Store, contenders: list[Contender]) -> None:
    assert contenders[0].take("work") == "held"
    with pytest.raises(LeaseHeldError) as refused, store.lease("work"):
        pytest.fail("two owners")
    message = str(refused.value)
    assert message.startswith(
        f"work is being worked on by process {contenders[0].process.pid} on {os.uname().nodename}"
    )
    assert f"since {datetime.now(UTC):%Y-}" in message
    assert "stop it, and rerun" in message
    assert refused.value.exit_code == ExitCode.LEASE_HELD


def test_the_lease_of_a_killed_process_is_taken_over(store: Store, contenders: list[Contender]) -> None:
    assert contenders[0].take("work") == "held"
    contenders[0].kill()
    with store.lease("work") as lease:
        assert lease.taken_over_from is not None
        assert f"process {contenders[0].process.pid} on" in lease.taken_over_from
    with store.lease("work") as lease:
        assert lease.taken_over_from is None


def test_a_process_that_waits_gets_it_when_it_is_let_go(store: Store, contenders: list[Contender]) -> None:
    assert contenders[0].take("work") == "held"
    with pytest.raises(LeaseHeldError), store.lease("work", timeout=0.3):
        pytest.fail("two owners")
    drop = threading.Timer(0.3, contenders[0].tell, ["drop"])
    drop.start()
    with store.lease("work", timeout=60) as lease:
        assert lease.taken_over_from is None
    drop.join()


def test_a_reused_process_number_is_no_owner(store: Store, contenders: list[Contender]) -> None:
    alive = contenders[0].process.pid
    assert contenders[0].take("other") == "held"
    owner = Owner(**json.loads(lease_file(store, "other").read_text()))
    assert owner.pid == alive
    plant(store, "work", owner)
    with pytest.raises(LeaseHeldError), store.lease("work"):
        pytest.fail("two owners")
    plant(store, "work", replace(owner, started=str(int(owner.started) - 1)))
    with store.lease("work") as lease:
        assert lease.taken_over_from is not None


def test_a_process_that_ended_but_was_not_reaped_is_dead(store: Store) -> None:
    victim = Contender(Path(store.location))
    assert victim.take("work") == "held"
    victim.process.kill()
    os.waitid(os.P_PID, victim.process.pid, os.WEXITED | os.WNOWAIT)
    with store.lease("work") as lease:
        assert lease.taken_over_from is not None
    victim.kill()


def test_a_stopped_process_on_this_machine_keeps_its_lease(store: Store, contenders: list[Contender]) -> None:
    """It may go on at any moment, and it is there to be asked."""
    assert contenders[0].take("work") == "held"
    contenders[0].process.send_signal(signal.SIGSTOP)
    os.utime(lease_file(store, "work"), (0, 0))
    with pytest.raises(LeaseHeldError), store.lease("work"):
        pytest.fail("two owners")


def test_another_machines_lease_is_stale_after_a_silent_minute(store: Store) -> None:
    plant(store, "work", elsewhere(), silent_seconds=50)
    with pytest.raises(LeaseHeldError, match="on other-host"), store.lease("work"):
        pytest.fail("two owners")
    plant(store, "work", elsewhere(), silent_seconds=70)
    with store.lease("work") as lease:
        assert "other-host" in str(lease.taken_over_from)


def test_another_machines_heartbeat_keeps_its_lease(store: Store) -> None:
    owner = elsewhere()
    plant(store, "work", owner, silent_seconds=3600)
    beat = Path(store.location, "leases", f"work.json.{owner.token}.beat")
    beat.touch()
    with pytest.raises(LeaseHeldError), store.lease("work"):
        pytest.fail("two owners")
    os.utime(beat, (time.time() - 70, time.time() - 70))
    with store.lease("work"):
        assert not beat.exists()


def test_half_a_lease_file_is_taken_over(store: Store) -> None:
    file = lease_file(store, "work")
    file.parent.mkdir()
    file.write_bytes(Owner.here().encode()[:20])
    with store.lease("work") as lease:
        assert lease.taken_over_from is not None


def test_the_heart_beats_while_the_lease_is_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.01)
    with store.lease("work") as lease:
        beat = Path(store.location, "leases", f"work.json.{lease.owner.token}.beat")
        wait_for(beat)
        os.utime(beat, (0, 0))
        deadline = time.monotonic() + 30
        while beat.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert list(beat.parent.iterdir()) == [beat.parent / ".lock"]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_letting_go_of_a_lost_lease_leaves_the_new_owners_alone(store: Store) -> None:
    with store.lease("work") as lost:
        lease_file(store, "work").unlink()
        with store.lease("work") as found:
            assert not lost.is_ours()
            with pytest.raises(LeaseHeldError, match="taken over by process"), lost.confirmed():
                pytest.fail("not ours")
            lost.__exit__(None, None, None)
            assert found.is_ours()


@pytest.mark.parametrize("key", ["promote:a/b model", "../../outside", "..", "ü" * 200])
def test_any_key_names_a_file_in_the_store(store: Store, key: str) -> None:
    with store.lease(key):
        files = [p for p in Path(store.location).rglob("*.json") if p.is_file()]
        assert [p.parent for p in files] == [Path(store.location, "leases")]
        with pytest.raises(LeaseHeldError), store.lease(key):
            pytest.fail("two owners")
    with store.lease("promote:a/b model2"), store.lease("promote:a/b model"):
        pass


def test_remote_storage(tmp_path: Path) -> None:
    store = Store.open(f"memory://leases/{tmp_path}")
    with store.lease("work"):
        with pytest.raises(LeaseHeldError), store.lease("work"):
            pytest.fail("two owners")
        file = store.folder.read("leases/work.json")
    assert store.folder.read("leases/work.json") is None
    assert file is not None

    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    store.folder.write("leases/work.json", replace(Owner.here(), pid=int(gone.stdout), started="1").encode())
    with store.lease("work") as lease:
        assert lease.taken_over_from is not None


def test_remote_storage_judges_other_machines_by_its_own_clock(tmp_path: Path) -> None:
    import fsspec

    store = Store.open(f"memory://leases/{tmp_path}")
    store.folder.write("leases/work.json", elsewhere().encode())
    with pytest.raises(LeaseHeldError, match="on other-host"), store.lease("work"):
        pytest.fail("two owners")
    stored = fsspec.filesystem("memory").store[f"/leases/{tmp_path}/leases/work.json"]
    stored.modified -= timedelta(seconds=70)
    with store.lease("work") as lease:
        assert "other-host" in str(lease.taken_over_from)
