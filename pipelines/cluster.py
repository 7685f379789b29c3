"""The Ray cluster a run works on: started here, already running, or the submitted job's own.

Nothing starts before `connect`, which the flow calls only once a stage really has to run.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.errors import UserError
from pipelines import local_ray
from pipelines.ray_job import in_ray_job
from pipelines.ray_process import is_debug, mute_raylet, restrained, set_environment, verbosity
from pipelines.telemetry import say

PACKAGES = ("pipelines", "dflash_core")
"""What the workers of a running cluster are sent."""
PROBE_SECONDS = 5.0
ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call that any Ray head answers, even to an empty request."""


@dataclass(frozen=True)
class ClusterInfo:
    """What a connected cluster offers."""

    num_cpus: int
    num_gpus: int
    num_nodes: int
    memory_bytes: int
    """That Ray may give to workers, on all nodes."""
    address: str
    local: bool
    """Started by this process, and ended with it."""


@dataclass
class _Connection:
    """The process's one connection: Ray itself keeps it in globals."""

    info: ClusterInfo | None = None
    temp_dir: Path | None = None


_connection = _Connection()


def connect(
    address: str | None = None, *, store_location: str | None = None, num_cpus: int | None = None
) -> ClusterInfo:
    """Join a Ray cluster, or start a local one; a second call returns the first one's answer.

    address: "HOST:PORT" of a running cluster's head, "auto" for the one on this machine, "local"
    for an own one. None means the submitted job's cluster, else `RAY_ADDRESS`, else "local".
    store_location: the store's folder or URI; a folder has to be visible from every node.
    num_cpus: of a local Ray; by default all that this process may use.
    Raises UserError if the cluster can't be joined, or doesn't see the store.
    """
    if _connection.info is not None:
        return _connection.info
    address = address or os.environ.get("RAY_ADDRESS") or (None if in_ray_job() else "local")
    set_environment()
    if address not in (None, "auto", "local"):
        assert address is not None
        require_head(address)
    atexit.register(disconnect)
    try:
        with restrained():
            if address == "local":
                say("starting Ray on this machine, for this run alone")
                _connection.temp_dir = local_ray.start(num_cpus or local_ray.cpu_budget())
            else:
                _attach(address)
        mute_raylet()
        info = _describe(local=address == "local")
        if store_location is not None and info.num_nodes > 1:
            _require_visible(store_location)
    except BaseException:
        disconnect()
        raise
    _connection.info = info
    return info


def disconnect() -> None:
    """Leave the cluster, and end it if it was started here; harmless when not connected."""
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()
    if _connection.temp_dir is not None and not is_debug():
        shutil.rmtree(_connection.temp_dir, ignore_errors=True)
    _connection.info = _connection.temp_dir = None


def _attach(address: str | None) -> None:
    """Join a running cluster. A submitted job brings its own code; otherwise ours is sent along."""
    import ray

    runtime_env: dict[str, Any] | None = None
    if not in_ray_job():
        folders = [str(local_ray.PROJECT_ROOT / package) for package in PACKAGES]
        runtime_env = {"py_modules": folders, "excludes": ["__pycache__"]}
    try:
        ray.init(address=address, runtime_env=runtime_env, **verbosity())
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _cannot_join(address or "auto", str(error)) from error


def require_head(address: str) -> None:
    """Raise UserError unless a Ray head at `address` lets us in, within seconds.

    `ray.init` itself tries for over a minute, and can end the process without an exception.
    """
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"{address} is the address of a Ray dashboard: "
            "use it with `ray job submit --address`, or give the head node's HOST:6379 here"
        )
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(f"{address!r} is no address of a Ray cluster: give its head node's HOST:6379")
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary(ALIVE)(b"", timeout=PROBE_SECONDS)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                raise _cannot_join(address, "no Ray head answers there") from None
            if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
                raise UserError(
                    f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and "
                    "RAY_AUTH_TOKEN to what `ray get-auth-token` prints on its head node"
                ) from None


def _cannot_join(address: str, reason: str) -> UserError:
    reason = " ".join(reason.split()).rstrip(".")
    return UserError(
        f"cannot join the Ray cluster at {address} ({reason}): start one with `ray start --head`, "
        "mend --ray-address or RAY_ADDRESS, or leave both out to run on this machine alone"
    )


def _describe(*, local: bool) -> ClusterInfo:
    import ray

    resources = ray.cluster_resources()
    return ClusterInfo(
        num_cpus=max(1, int(resources.get("CPU", 0))),
        num_gpus=int(resources.get("GPU", 0)),
        memory_bytes=int(resources.get("memory", 0)),
        num_nodes=sum(bool(node["Alive"]) for node in ray.nodes()),
        address=ray.get_runtime_context().gcs_address,
        local=local,
    )


def _require_visible(location: str) -> None:
    """Raise UserError if a node doesn't see the store's folder, by looking from each of them."""
    if "://" in location and not location.startswith("file://"):
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    folder = Path(location.removeprefix("file://")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    look = ray.remote(num_cpus=0)(os.path.exists)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    with tempfile.NamedTemporaryFile(prefix=".visible-", dir=folder) as mark:
        seen = ray.get([look.options(scheduling_strategy=place).remote(mark.name) for place in places])
    blind = [node["NodeManagerAddress"] for node, sees in zip(nodes, seen, strict=True) if not sees]
    if blind:
        raise UserError(
            f"the store {folder} is not visible from the node {', '.join(blind)}: "
            "put it on storage that all nodes share, or give an s3:// or gs:// URI"
        )


def _may_grow(num_cpus: float, num_gpus: float) -> bool:
    """Whether the cluster has an autoscaler that may add nodes until so much is there."""
    import ray

    try:
        most = ray._private.state.state.get_max_resources_from_cluster_config()  # noqa: SLF001 - as Ray Train
    except Exception:  # noqa: BLE001 - Ray's own internals: what they may raise is not said
        return False
    return most is not None and most.get("CPU", 0) >= num_cpus and most.get("GPU", 0) >= num_gpus


def require_room(count: int, *, num_cpus: float, num_gpus: float) -> None:
    """Raise UserError if the connected cluster, grown as far as it may, can't hold `count` such workers.

    Ray itself waits for room without end.
    """
    import ray

    room = 0.0
    for node in ray.nodes():
        has = node["Resources"] if node["Alive"] else {}
        shares = [has.get(kind, 0) / size for kind, size in (("CPU", num_cpus), ("GPU", num_gpus)) if size]
        room += int(min(shares, default=count))
    if room < count and not _may_grow(count * num_cpus, count * num_gpus):
        total = ray.cluster_resources()
        raise UserError(
            f"{count} workers of {num_cpus:g} CPUs and {num_gpus:g} GPUs each don't fit the cluster "
            f"({total.get('CPU', 0):g} CPUs and {total.get('GPU', 0):g} GPUs on its nodes): ask for less"
        )
