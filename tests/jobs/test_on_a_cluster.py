"""The main job on a Ray that runs already: joined by address, and submitted with its code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.jobs.conftest import ROOT, Home, last_json
from tests.pipelines.processes import until
from tests.pipelines.ray_nodes import free_port, ray_head

OFF = {"RAY_AUTH_MODE": "disabled"}


@pytest.mark.slow
def test_a_running_cluster_is_used_by_address_and_by_submission(make_home: Callable[[str], Home]) -> None:
    home = make_home("cluster")
    dashboard = free_port()
    with ray_head(dashboard_port=dashboard, **OFF) as address:
        joined = home.run(
            "realign.py",
            home.arguments(home.target, "--json", "--ray-address", address),
            env={**os.environ, **OFF},
        )
        assert joined.returncode == 0, joined.stderr
        result = last_json(joined.stdout)
        assert result["outcome"] == "promoted" and not result["already_done"]

        outputs: list[str] = []

        def submitted() -> bool:
            """`ray start` is ready before the agent that takes jobs is: try again."""
            done = subprocess.run(
                _submission(home, dashboard),
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, **OFF},
            )
            outputs.append(done.stdout + done.stderr)
            return done.returncode == 0

        until(submitted, 200)
    line = next(line for line in outputs[-1].splitlines() if line.startswith('{"outcome"'))
    again = last_json(line)
    # Its own registry and store: everything was made once more, by the copy of the code that was sent.
    assert again["outcome"] == "promoted" and not again["already_done"]
    assert again["target"]["fingerprint"] == result["target"]["fingerprint"]
    assert again["tau"] == result["tau"]


def _submission(home: Home, dashboard: int) -> list[str]:
    """What the README tells a user to type."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
    arguments = home.arguments(home.target, "--json")
    for flag, file in (("--prompts", "train.jsonl"), ("--eval-prompts", "gate.jsonl")):
        arguments[arguments.index(flag) + 1] = str(home.folder / file)
    places = ["--store", str(home.folder / "job-store"), "--tracking-uri", f"sqlite:///{home.folder}/job.db"]
    job = [sys.executable, "jobs/realign.py", *arguments, *places]
    return [*ray, f"--address=http://127.0.0.1:{dashboard}", "--working-dir=.", "--", *job]
