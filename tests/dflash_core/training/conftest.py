"""A random target and the shape of a drafter for it."""

from __future__ import annotations

import pytest

from dflash_core.models.drafter_config import DrafterConfig
from dflash_core.models.target import Target
from tests.dflash_core.small_models import drafter_config, random_target


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(seed=3)


@pytest.fixture(scope="module")
def config(target: Target) -> DrafterConfig:
    return drafter_config(target)
