"""Where and in which precision a stage's actors run: chosen once from the configuration and the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.budget import TINY_PARAMETERS
from pipelines.config import RealignConfig

if TYPE_CHECKING:
    import torch


PROCESS_BYTES = 800 << 20
"""An actor before it loads a target: 0.47 GB resident was seen; the rest is margin."""


@dataclass(frozen=True)
class Placement:
    """Device, precision and share of the cluster for each actor of a pool."""

    device: str
    dtype: str
    threads: int
    """Of each actor."""
    train_threads: int
    """Of each training worker, which has its machine to itself."""
    num_actors: int
    """Of a pool, at most."""
    min_actors: int
    """That must have started before a pool begins."""
    cpus_per_actor: float
    gpus_per_actor: float
    keep_actors: bool
    """Whether actors stay up beside training and from one realignment to the next."""
    release_idle: bool
    """Whether an actor that finds no task left is ended, since others may wait for its room."""


@dataclass(frozen=True)
class Machine:
    """What the jobs may use."""

    num_cpus: int
    num_gpus: int
    memory_bytes: int | None = None
    """Of all nodes, where known."""
    own: bool = True
    """Nobody else's jobs wait for its CPUs and GPUs."""


def place(config: RealignConfig, machine: Machine, num_parameters: int) -> Placement:
    """One actor per GPU where there are GPUs, else one per CPU core, each with one thread.

    On shared cores several single-threaded actors beat one actor with several threads, since decoding
    is a chain of small kernels. On CPUs there are no more of them than memory holds.
    """
    on_gpu = config.device == "cuda" or (config.device == "auto" and machine.num_gpus > 0)
    tiny = num_parameters < TINY_PARAMETERS
    resources = config.resources
    keep = False
    if on_gpu:
        gpus = resources.gpus_per_actor or 1.0
        most = resources.actors or max(1, int(machine.num_gpus / gpus))
        cpus, threads = resources.cpus_per_actor or 1.0, resources.threads or 4
    else:
        gpus = 0.0
        most = resources.actors or max(1, min(machine.num_cpus, _fitting(machine, num_parameters)))
        # A tiny target's actors cost more to start than to keep, so they take half the cores and stay;
        # on a shared cluster two jobs could so keep each other's trainings waiting for ever.
        cpus = resources.cpus_per_actor or (0.5 if tiny and machine.own else 1.0)
        threads = resources.threads or max(1, machine.num_cpus // most)
        keep = tiny and machine.own and most * cpus + config.train.num_workers <= machine.num_cpus
    # Kernels of a tiny model are over before a second thread has woken up.
    train_threads = resources.threads or (1 if tiny else max(threads, machine.num_cpus))
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    return Placement(
        device="cuda" if on_gpu else "cpu",
        dtype=dtype,
        threads=threads,
        train_threads=train_threads,
        num_actors=most,
        min_actors=min(resources.min_actors, most),
        cpus_per_actor=cpus,
        gpus_per_actor=gpus,
        keep_actors=keep,
        release_idle=not machine.own,
    )


def _fitting(machine: Machine, num_parameters: int) -> int:
    """Actors that memory holds: weights in fp32, as much again for caches and logits, and a process."""
    if machine.memory_bytes is None:
        return machine.num_cpus
    return int(machine.memory_bytes * 0.8 / (8 * num_parameters + PROCESS_BYTES))


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a configured precision."""
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
