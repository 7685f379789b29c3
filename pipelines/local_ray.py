"""An own Ray on this machine: as large as the process may be, private, and gone with it.

Ray's ports listen on every interface of the machine, whatever address it is given, and whoever
reaches them can run code. So this Ray asks for a token that is made up for this process and never
written to disk. (Ray's own default writes `~/.ray/auth_token`, after which every later `ray start`
of that user asks for it too.) A user who sets `RAY_AUTH_MODE` decides otherwise.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipelines.ray_process import verbosity

PROJECT_ROOT = Path(__file__).resolve().parents[1]
OBJECT_STORE_BYTES = 256 << 20
"""References and manifest rows travel through it, never tensors."""
PREFIX, OWNER = "dflash-ray-", "owner"
LONGEST_TEMP_DIR = 40
"""A unix socket's path ends at 107 characters, of which Ray's session takes up to 65."""


def cpu_budget() -> int:
    """CPUs this process may use: its affinity, cut by the container's quota; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # cgroup v2; "max" is no number and means no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cpus = min(cpus, int(quota) // int(period))
    with suppress(OSError, ValueError):  # cgroup v1; -1 means no quota
        folder = Path("/sys/fs/cgroup/cpu")
        micros = int((folder / "cpu.cfs_quota_us").read_text())
        if micros > 0:
            cpus = min(cpus, micros // int((folder / "cpu.cfs_period_us").read_text()))
    return max(1, cpus)


def memory_budget() -> int | None:
    """Bytes this process may still take: what the machine has free, cut by the container's limit."""
    free = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # cgroup v2; "max" is no number and means no limit
        folder = Path("/sys/fs/cgroup")
        free.append(int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    return min(free, default=None)


def start(num_cpus: int) -> Path:
    """Start Ray and connect to it; returns its temporary directory, to be deleted after it ends."""
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    _sweep(Path(_short_folder()))
    temp_dir = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=_short_folder()))
    (temp_dir / OWNER).write_text(platform.node())
    import ray

    with _importable_by_children():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(temp_dir),
            **verbosity(),
        )
    return temp_dir


def _sweep(folder: Path) -> None:
    """Remove what a killed run's Ray left: its folder names the process that owned it."""
    for left in folder.glob(f"{PREFIX}*-*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        with suppress(OSError):
            here = (left / OWNER).read_text() == platform.node()  # another container's pids mean nothing
            if not here or not owner.isdecimal() or _alive(int(owner)):
                continue
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _short_folder() -> str:
    wanted = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return wanted if len(wanted) + len("/dflash-ray-1234567-12345678") <= LONGEST_TEMP_DIR else "/tmp"  # noqa: S108


@contextmanager
def _importable_by_children() -> Iterator[None]:
    """Let the processes started inside find our packages, wherever the project is installed.

    An environment variable and not a runtime environment, which would keep Ray from using the
    worker processes that it starts ahead.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT_ROOT), before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
