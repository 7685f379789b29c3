"""Ray nodes as an administrator starts them, each with its own ports and folder, ended by their session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.pipelines.processes import end_session, until


@contextmanager
def ray_node(
    *options: str, prefix: tuple[str, ...] = (), **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`ray start` with `options`, in the foreground of a session of its own."""
    command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2"]
    fixed = ["--disable-usage-stats", f"--dashboard-agent-listen-port={free_port()}"]
    node = subprocess.Popen(
        [*command, *fixed, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=os.environ | environment,
        start_new_session=True,
    )
    try:
        yield node
    finally:
        end_session(node.pid)
        node.wait()


@contextmanager
def ray_head(*, dashboard_port: int | None = None, **environment: str) -> Iterator[str]:
    """A head node; yields its HOST:PORT once that is open."""
    port = free_port()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    dashboard = ["--include-dashboard=false"]
    if dashboard_port is not None:
        dashboard = ["--include-dashboard=true", f"--dashboard-port={dashboard_port}"]
    options = ["--head", f"--port={port}", f"--temp-dir={folder}", f"--ray-client-server-port={free_port()}"]
    try:
        with ray_node(*options, *dashboard, **environment):
            until(lambda: is_open(port), 120)
            yield f"127.0.0.1:{port}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def copy_packages(root: Path, folder: Path) -> None:
    """What `--working-dir .` of a checkout ships."""
    for package in ("pipelines", "dflash_core"):
        shutil.copytree(root / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
