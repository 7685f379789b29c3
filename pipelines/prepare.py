"""From a configuration to everything the flow needs, before any of it runs.

Validates the target, reads the prompts, fits the budgets to the machine and opens store and registry.
Imports neither torch nor Ray, and asks a cluster for its size only where one is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_core.checkpoints.checkpoint import open_checkpoint, resolve_target
from dflash_core.checkpoints.mask_token import MaskToken, choose_mask_token
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.models.drafter_config import DrafterConfig
from dflash_core.prompts.prompt_choice import PromptRequest
from dflash_core.prompts.thinking import check_thinking
from dflash_core.store.artifacts import Store
from dflash_core.store.folder import open_folder
from dflash_core.tracking import DEFAULT_TRACKING_URI, resolve_tracking_uri
from pipelines import kept_budget, prompts, settled
from pipelines.budget import resolve_budget
from pipelines.config import RealignConfig
from pipelines.context import Context
from pipelines.drafters import first_drafter, gate_policy
from pipelines.engines import check_engine
from pipelines.local_ray import cpu_budget, memory_budget
from pipelines.measure import read_chat_template
from pipelines.placement import Machine, place
from pipelines.plan import Plan
from pipelines.ray_job import in_ray_job, stable_folder
from pipelines.registry import Registry
from pipelines.stage import OnEvent


@dataclass(frozen=True)
class Prepared:
    """A realignment that is ready to run."""

    context: Context
    registry: Registry
    asked: Plan
    """The request before its automatic budget was resolved."""
    prompts: PromptRequest
    mask_token: MaskToken
    shape: DrafterConfig
    """Of a drafter trained from nothing; a champion keeps its own."""
    request: str
    """Identity of what was asked for."""


def prepare(config: RealignConfig, on_event: OnEvent, *, make_store: bool = True) -> Prepared:
    """Validate everything that can be validated without running a model. Raises UserError.

    make_store: make and try the store's folder; without it a store that is not there is taken as empty.
    """
    check_engine(config)
    template = read_chat_template(config.chat_template)
    # Absolute: actors and submitted jobs stand in other folders.
    path = resolve_target(config.target).absolute()
    base = stable_folder()
    guard = TargetGuard.of(path)
    checkpoint = open_checkpoint(path, chat_template=template, cache_dir=_cache_dir())
    guard.check()
    connect, machine = _cluster(config, _under(base, config.store))
    placement = place(config, machine, checkpoint.num_parameters)
    asked = kept_budget.plan(config, checkpoint, placement)
    automatic_size = config.generate.num_prompts is None
    config = _recalled(_under(base, config.store), asked, config) or resolve_budget(
        config,
        checkpoint.num_parameters,
        machine.num_gpus,
        machine.num_cpus,
        max_positions=checkpoint.config.max_positions,
    )
    check_thinking(checkpoint, config.generate.thinking)
    asked_prompts = prompts.prompt_request(config, _cache_dir(), automatic_size=automatic_size)
    mask_token = choose_mask_token(checkpoint, config.mask_token_id)
    shape = first_drafter(config, checkpoint, mask_token)
    gate_policy(config, shape.block_size)
    store = _store(_under(base, config.store), make=make_store)
    name = config.model_name or checkpoint.family
    tracking_uri = resolve_tracking_uri(config.tracking_uri or DEFAULT_TRACKING_URI, base)
    registry = Registry(tracking_uri, name)
    context = Context(config, store, checkpoint, guard, placement, connect, on_event)
    return Prepared(
        context=context,
        registry=registry,
        asked=asked,
        prompts=asked_prompts,
        mask_token=mask_token,
        shape=shape,
        request=settled.request_identity(context, prompts.plan(asked_prompts)),
    )


def _store(location: str, *, make: bool) -> Store:
    if make or "://" in location or Path(location).exists():
        return Store.open(location)
    folder = open_folder(location)
    return Store(folder.location, folder)


def _recalled(store: str, asked: Plan, config: RealignConfig) -> RealignConfig | None:
    """What an earlier run left; a store is not made before everything else has been validated."""
    if "://" not in store and not Path(store).exists():
        return None
    return kept_budget.recall(Store.open(store), asked, config)


def _under(base: Path, location: str) -> str:
    if "://" in location or Path(location).is_absolute():
        return location
    return str(base / location)


def _cache_dir() -> Path:
    """Digests of large files, kept by path, size and times; per user, since paths are per machine."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "dflash-align" / "digests"


def _cluster(config: RealignConfig, store: str) -> tuple[Callable[[], object], Machine]:
    """How to reach Ray later, and what it will offer.

    A local Ray is not started to be asked: it will have what this machine has.
    """
    address = config.ray_address or os.environ.get("RAY_ADDRESS")

    def connect() -> object:
        from pipelines.cluster import connect as join

        return join(address, store_location=store)

    if address or in_ray_job():
        from pipelines.cluster import connect as join

        info = join(address, store_location=store)
        return connect, Machine(info.num_cpus, info.num_gpus, info.memory_bytes, own=info.local)
    return connect, Machine(cpu_budget(), _local_gpus(), memory_budget())


def _local_gpus() -> int:
    """NVIDIA devices of this machine that the process may use; read without loading a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
