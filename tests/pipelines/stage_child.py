"""A process that runs stages and can be killed before any of its file operations.

Reads one JSON command a line from stdin and answers with one JSON line on stdout. Each command runs in a
fork of its own, so that a kill is a real one and costs no interpreter start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_core.errors import DFlashError
from dflash_core.store.artifacts import Store, Workspace
from pipelines.stage import StageEvent, StageResult, run_stage

FILE_EVENTS = {
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.scandir",
    "os.utime",
    "os.listdir",
}
BLOCK = bytes(range(256)) * 400


def run(
    store: str, made: str, *, resumable: bool, on_event: Callable[[StageEvent], None] | None = None
) -> StageResult:
    """The stage under test; every file that it makes is noted in the file `made`, outside the store."""

    def note(name: str) -> None:
        with Path(made).open("a") as stream:
            stream.write(f"{name}\n")

    def body(workspace: Workspace) -> dict[str, Any]:
        if workspace.record("drafter/model.bin") is None:
            note("drafter/model.bin")
            with workspace.scratch() as scratch:
                (scratch / "weights").write_bytes(BLOCK)
                workspace.put("drafter/model.bin", scratch / "weights")
        if workspace.record("copied.bin") is None:
            note("copied.bin")
            workspace.put("copied.bin", Path(made).parent / "source.bin")
        # What a trainer keeps for itself is no part of the output.
        state = Path(workspace.location, "trainer", "state")
        state.parent.mkdir(exist_ok=True)
        state.write_bytes(b"half-trained")
        if workspace.get_json("rows/a.json") is None:
            note("rows/a.json")
            workspace.put_json("rows/a.json", {"tokens": 7})
        for number in (1, 2):
            workspace.put_json("twice.json", number)
        return {"files": 4}

    return run_stage(
        Store.open(store),
        "train",
        {"seed": 1},
        body,
        code_version=1,
        resumable=resumable,
        on_event=on_event,
    )


def kill_before(number: int, root: str) -> None:
    """Kill this process right before its `number`-th file operation under `root`."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        # Removing a tree names files relative to an open directory.
        relative = event in ("os.remove", "os.rmdir") and arguments[-1] != -1
        if event in FILE_EVENTS and (relative or any(str(a).startswith(root) for a in arguments)):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def lose_lease(store: str) -> None:
    """Remove the lease, as another machine would that takes it over, when the manifest is being written."""
    lost = False

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal lost
        if event == "open" and "/.manifest.json." in str(arguments[0]) and not lost:
            lost = True
            for lease in Path(store, "leases").glob("*.json"):
                lease.unlink()

    sys.addaudithook(watch)


def blocked(store: str, fifo: str) -> None:
    """Put a file whose bytes come from a pipe that somebody else fills."""

    def body(workspace: Workspace) -> dict[str, Any]:
        workspace.put("slow.bin", Path(fifo))
        return {}

    run_stage(Store.open(store), "train", {"slow": True}, body, code_version=1, resumable=True)


def _serve(command: dict[str, Any]) -> int:
    """Exit code of the command in a fork; negative for the signal that ended it."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if command["kill_before"]:
            kill_before(command["kill_before"], command["store"])
        else:
            lose_lease(command["store"])
        run(command["store"], command["made"], resumable=command["resumable"])
    except DFlashError as error:
        os._exit(error.exit_code)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(99)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        try:
            blocked(*sys.argv[1:])
        except DFlashError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
    else:
        for line in sys.stdin:
            print(_serve(json.loads(line)), flush=True)
