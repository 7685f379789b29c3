"""A stage's progress as Prometheus reads it from a real Ray node."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from dflash_core.store.artifacts import Store, Workspace
from pipelines.cluster import ClusterInfo
from pipelines.pool import release_actors
from pipelines.telemetry import progress
from tests.pipelines.test_sharded import TASKS, run_tasks, stage

NAMES = ("done", "size", "units_per_second", "tokens_per_second", "eta_seconds")
WRITTEN = "written_bytes_total"


STAGE = "tiny extract"


def scrape() -> dict[str, float]:
    """Name -> value of each metric of our stage; earlier tests' stages stand at the same port."""
    import ray

    addresses = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes() if n["Alive"]]
    found = {}
    for address in addresses:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        for line in text.splitlines():
            if match := re.fullmatch(r"ray_dflash_stage_(\w+)\{(.*)\} (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                if labels["stage"] == STAGE:
                    assert (labels["target"], labels["unit"]) == ("0123456789ab", "samples")
                    found[match[1]] = float(match[3])
    return found


def test_a_stages_numbers_stand_at_the_nodes_metrics_port(local_ray: ClusterInfo, tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    with progress(STAGE, len(TASKS) + 2, "samples", "0123456789ab") as bar:
        bar.advance(2, fresh=False, tokens=1_000, bytes=1_000)

        def body(workspace: Workspace) -> None:
            run_tasks(
                workspace, lambda row, fresh: bar.advance(1, fresh=fresh, tokens=10, bytes=row["bytes"])
            )

        stage(store, body)
        expected = {"units_total": len(TASKS), "tokens_total": 10 * len(TASKS), "done": len(TASKS) + 2}
        found: dict[str, float] = {}
        end = time.monotonic() + 120
        # All at once: a scrape may fall between two metrics of one report.
        while not (found.items() >= expected.items() and found.keys() >= {*NAMES, *expected, WRITTEN}):
            assert time.monotonic() < end, found
            time.sleep(0.5)
            with contextlib.suppress(OSError):  # the node's agent is slow to answer on a busy machine
                found = scrape()
    assert found[WRITTEN] == sum(len(t["name"]) for t in TASKS)
    assert found["size"] == len(TASKS) + 2
    assert found["units_per_second"] > 0
    release_actors()


def test_without_ray_nothing_is_recorded_and_ray_is_not_imported() -> None:
    code = (
        "import sys; from pipelines.telemetry import progress\n"
        "with progress('extract', 2, 'samples', 'abc') as bar: bar.advance(2, tokens=3, bytes=1_500_000)\n"
        "print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
    assert done.stderr.strip().endswith("tokens 3 · bytes 1.5 MB")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1 kB"), (999_700, "1 MB"), (35 * 10**12, "35 TB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    from pipelines.telemetry import bytes_text

    assert bytes_text(count) == text
