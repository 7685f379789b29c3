"""A shard that changed on disk after it was committed: its stage is taken up again for that one shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dflash_core.store.artifacts import DamagedArtifactError, Store
from dflash_core.store.attempt import Attempt
from dflash_core.store.workspace import row_name
from pipelines.telemetry import say

T = TypeVar("T")


def mending(store: Store, work: Callable[[], T]) -> T:
    """`work()`, begun again whenever it meets a damaged shard, which its stage then makes anew.

    Raises DamagedArtifactError for what is no shard of a stage, and for a shard that is damaged twice.
    """
    mended: set[tuple[str, str]] = set()
    while True:
        try:
            return work()
        except DamagedArtifactError as error:
            file = error.location, error.name
            if file in mended or not _reopen(store, error):
                raise
            mended.add(file)
            say(f"{str(error).partition(': ')[0]}; that shard is made again")


def _reopen(store: Store, error: DamagedArtifactError) -> bool:
    """Whether it was a shard of this store's."""
    place = error.location.removeprefix(f"{store.location}/")
    stage, _, identity = place.partition("/")
    if place == error.location or not identity.isalnum():
        return False
    artifact = store.artifact(stage, identity)
    if artifact is None or row_name(error.name) not in {record.name for record in artifact.files}:
        return False
    with store.lease(f"{stage}-{identity}") as lease:
        Attempt(store, lease, stage, identity, resumable=True).reopen(error.name)
    return True
