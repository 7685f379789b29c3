"""The drafters that serve, of every family that a store's registries know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_core import tags as t
from dflash_core.errors import UserError
from dflash_core.store.retention import Served
from dflash_core.tracking import display_uri, sqlite_path
from pipelines.mlflow_client import plain_errors
from pipelines.registry import RegisteredDrafter, Registry

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


def served_drafters(tracking_uri: str) -> list[Served]:
    """Every version of ours that an alias points at: champions, challengers, and whoever serves a target.

    Raises UserError for a registry that is not there or does not answer: its drafters would be lost.
    """
    path = sqlite_path(tracking_uri)
    if path is not None and not path.exists():
        raise UserError(
            f"the registry {display_uri(tracking_uri)} is not there, so nobody can tell what its drafters "
            "need: bring it back, or pass --ignore-registries if it is gone for good"
        )
    found: list[Served] = []
    client = Registry(tracking_uri, "any").client
    with plain_errors(tracking_uri):
        for name in _our_models(client):
            registry = Registry(tracking_uri, name)
            aliases = client.get_registered_model(name).aliases
            versions = sorted({int(number) for number in aliases.values()})
            found += [_served(registry.version(version)) for version in versions]
    return found


def _our_models(client: MlflowClient) -> Iterator[str]:
    token = None
    while True:
        page = client.search_registered_models(max_results=100, page_token=token)
        yield from (model.name for model in page if t.SCHEMA in model.tags)
        token = page.token
        if not token:
            return


def _served(drafter: RegisteredDrafter) -> Served:
    roles = [alias for alias in drafter.aliases if not alias.startswith(t.TARGET_PREFIX)]
    role = f" ({', '.join(roles)})" if roles else ""
    name = f"version {drafter.version} of {drafter.name}{role}"
    made_of = {drafter.tags.get(tag) for tag in (t.CORPUS_FINGERPRINT, t.FEATURES_FINGERPRINT)}
    return Served(drafter.drafter_fingerprint, name, frozenset(tag for tag in made_of if tag))
