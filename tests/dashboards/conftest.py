"""A registry with a history, written as the jobs write it, and the dashboard over it as a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core import tags as t
from dflash_core.types import Interval
from pipelines.registry import Registry

CHECKOUT = Path(__file__).parents[2]
FAMILY = "tiny-2x64 é+1"
SCRIPT = "<script>document.title='owned'</script>"
IMAGE = "<img src=x onerror='document.title=1'>"


def around(tau: float) -> Interval:
    return Interval(tau, tau - 0.2, tau + 0.2)


class History:
    """Writes one realignment after another."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.uri = uri
        self.registry = Registry(uri, FAMILY)
        self.folder = folder
        self.run_ids: dict[str, str] = {}

    def realign(
        self, target: str, outcome: str, champion: float | None = None, candidate: float | None = None
    ) -> None:
        fingerprint = (target.encode().hex() * 64)[:64]
        old = self.registry.champion()
        run_id = self._log_run(target, fingerprint, outcome, champion, candidate)
        self.run_ids[target] = run_id
        tau = around(candidate or champion or 0.0)
        entry = t.ServeEntry(
            target_fingerprint=fingerprint,
            target_path=f"/models/{target}",
            tau=tau.estimate,
            tau_low=tau.low,
            tau_high=tau.high,
            outcome=outcome,
            job_identity=f"job-{target.encode().hex()}",
            run_id=run_id,
            at=t.utc_now(),
        )
        if outcome == "certified" and old:
            self.registry.certify(old.version, entry)
        elif outcome in ("promoted", "held"):
            version = self._register(target, fingerprint, run_id, tau, outcome)
            if outcome == "promoted":
                self.registry.promote(version, entry)
            else:
                self.registry.hold(version)

    def _log_run(
        self, target: str, fingerprint: str, outcome: str, champion: float | None, candidate: float | None
    ) -> str:
        report = self.folder / f"report-{len(self.run_ids)}"
        report.mkdir()
        (report / "report.html").write_text(f"<!doctype html><title>Report</title><h1>Hello</h1>{SCRIPT}")
        metrics = {f"{t.STAGE_SECONDS_PREFIX}train": 61.0, f"{t.STAGE_SECONDS_PREFIX}generate": 14.0}
        steps = {}
        if champion:
            metrics |= t.interval_metrics(t.TAU_CHAMPION, around(champion))
            steps[t.ACCEPTANCE_CHAMPION] = {1: 0.5, 2: 0.2, 3: 0.1}
        if candidate:
            metrics |= t.interval_metrics(t.TAU_CANDIDATE, around(candidate))
            steps[t.ACCEPTANCE_CANDIDATE] = {1: 0.9, 2: 0.7, 3: 0.5}
        tags = {
            t.JOB_IDENTITY: f"job-{target.encode().hex()}",
            t.OUTCOME: outcome,
            t.REASON: f"Because of {SCRIPT} & so on.",
            t.TARGET_FINGERPRINT: fingerprint,
            t.TARGET_PATH: f"/models/{target}",
        }
        return self.registry.log_run(
            tags=tags, params={}, metrics=metrics, step_metrics=steps, report_dir=report
        )

    def _register(self, target: str, fingerprint: str, run_id: str, tau: Interval, outcome: str) -> int:
        drafter = self.folder / f"drafter-{len(self.run_ids)}"
        drafter.mkdir()
        (drafter / "config.json").write_text(target)
        tags = {
            t.DRAFTER_FINGERPRINT: fingerprint[::-1],
            t.BLOCK_SIZE: "8",
            t.TARGET_FINGERPRINT: fingerprint,
            t.TARGET_PATH: f"/models/{target}",
            t.TAU: repr(tau.estimate),
            t.TAU_LOW: repr(tau.low),
            t.TAU_HIGH: repr(tau.high),
            t.OUTCOME: outcome,
        }
        return self.registry.register(drafter, run_id, tags).version


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    folder = tmp_path_factory.mktemp("history")
    history = History(f"sqlite:///{folder}/mlflow.db", folder)
    history.realign("base", "promoted", candidate=5.25)
    history.realign("sft-1", "promoted", champion=1.5, candidate=5.5)
    history.realign("sft-2", "certified", champion=5.4)
    history.realign(IMAGE, "rejected", champion=4.0, candidate=3.5)
    history.realign("rl-1", "held", champion=4.25, candidate=4.5)
    return history


@pytest.fixture(scope="session")
def site(history: History) -> Iterator[str]:
    """The address of `python -m dashboards`, running."""
    command = [sys.executable, "-m", "dashboards", "--port", "0", "--tracking-uri", history.uri]
    server = subprocess.Popen(
        command,
        cwd=history.folder,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        first_line = server.stdout.readline()  # printed once the port is bound
        yield first_line.rsplit(" on ", 1)[1].strip().rstrip("/")
    finally:
        server.terminate()
        server.communicate(timeout=30)
