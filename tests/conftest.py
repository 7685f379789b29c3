"""Environment of every test and of every process that a test starts.

Set before any library is imported: one thread each, no network, nothing written to the user's home or
to the checkout.
"""

from __future__ import annotations

import os
import shutil
import tempfile

from hypothesis import settings

_HOME = tempfile.mkdtemp(prefix="dflash-test-home-")

os.environ.update(
    HOME=_HOME,
    HF_HUB_OFFLINE="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    MKL_NUM_THREADS="1",
    OMP_NUM_THREADS="1",
    # Ray turns token authentication on for a whole machine by writing a file into the home.
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
)

# The machine is shared: no deadline. The same examples every time: a red build can be repeated.
settings.register_profile("dflash", deadline=None, derandomize=True, database=None)
settings.load_profile("dflash")


def pytest_unconfigure() -> None:
    """Remove the throwaway home."""
    shutil.rmtree(_HOME, ignore_errors=True)
