"""Where and in which precision a stage's actors run: chosen once from the configuration and the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.budget import TINY_PARAMETERS
from pipelines.config import RealignConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Placement:
    """Device, precision and share of the cluster for each actor of a pool."""

    device: str
    dtype: str
    threads: int
    """Of each actor."""
    train_threads: int
    """Of each training worker, which has its machine to itself."""
    num_actors: tuple[int, int]
    """Fewest and most actors of a pool."""
    cpus_per_actor: float
    gpus_per_actor: float


@dataclass(frozen=True)
class Machine:
    """What the jobs may use."""

    num_cpus: int
    num_gpus: int


def place(config: RealignConfig, machine: Machine, num_parameters: int) -> Placement:
    """One actor per GPU where there are GPUs, else one per CPU core, each with one thread.

    On shared cores several single-threaded actors beat one actor with several threads, since decoding
    is a chain of small kernels.
    """
    on_gpu = config.device == "cuda" or (config.device == "auto" and machine.num_gpus > 0)
    resources = config.resources
    if on_gpu:
        gpus = resources.gpus_per_actor or 1.0
        most = resources.actors or max(1, int(machine.num_gpus / gpus))
        cpus, threads = resources.cpus_per_actor or 1.0, resources.threads or 4
    else:
        gpus = 0.0
        most = resources.actors or max(1, machine.num_cpus)
        # Half a core is reserved per actor: Ray Data's own read task must find room beside the pool.
        cpus = resources.cpus_per_actor or 0.5
        threads = resources.threads or max(1, machine.num_cpus // most)
    # Kernels of a tiny model are over before a second thread has woken up.
    train_threads = resources.threads or (
        1 if num_parameters < TINY_PARAMETERS else max(threads, machine.num_cpus)
    )
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    return Placement(
        device="cuda" if on_gpu else "cpu",
        dtype=dtype,
        threads=threads,
        train_threads=train_threads,
        num_actors=(1, most),
        cpus_per_actor=cpus,
        gpus_per_actor=gpus,
    )


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a configured precision."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
