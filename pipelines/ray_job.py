"""Whether this process is the driver of a submitted Ray job, and where its files may stand.

Kept apart from `cluster` because defaults are resolved long before Ray is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

JOB_CONFIG_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for the driver of a submitted job, and for nothing else."""

UNPACKED_FOLDER = "working_dir_files"
"""The part of a path by which Ray's unpacked copies of a `--working-dir` are known."""


def in_ray_job() -> bool:
    """Whether this process is the driver of a `ray job submit`."""
    return JOB_CONFIG_VARIABLE in os.environ


def stable_folder() -> Path:
    """Where relative default paths belong: a folder that is still there tomorrow.

    That is the working folder, except in a job submitted with `--working-dir`, which runs in a
    copy that Ray unpacked and will delete: there it is `~/.dflash` of the user Ray runs as, on the
    node that runs the job's driver (the head, unless told otherwise).
    """
    here = Path.cwd()
    if in_ray_job() and UNPACKED_FOLDER in here.parts:
        return Path.home() / ".dflash"
    return here
