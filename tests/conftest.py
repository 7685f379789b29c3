"""Environment of every test and of every process that a test starts.

Set before any library is imported: one thread each, no network, nothing written to the user's home.
"""

from __future__ import annotations

import os
import shutil
import tempfile

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


def pytest_unconfigure() -> None:
    """Remove the throwaway home."""
    shutil.rmtree(_HOME, ignore_errors=True)
