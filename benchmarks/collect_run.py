"""Gather what realignments left in a store into one result file: τ, curves, seconds and memory per stage.

    python benchmarks/collect_run.py OUT.json STORE LABEL=RESULT.json ...

RESULT.json is a file whose last line is what `jobs/realign.py --json` printed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

from dflash_core.store.artifacts import Store


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("store")
    parser.add_argument("runs", nargs="+", metavar="LABEL=RESULT.json")
    parser.add_argument("--command", action="append", default=[], help="a command that was run")
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    store = Store.open(options.store)
    runs = {}
    for text in options.runs:
        label, _, path = text.partition("=")
        runs[label] = describe(store, json.loads(Path(path).read_text().strip().splitlines()[-1]))
    result = {
        "commands": options.command,
        "machine": {"cpus": os.cpu_count(), "processor": _processor(), "python": platform.python_version()},
        "note": options.note,
        "runs": runs,
    }
    options.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe(store: Store, result: dict[str, Any]) -> dict[str, Any]:
    """One run: its outcome, and each stage as it was made."""
    report = json.loads(Path(result["report"]).with_name("report.json").read_text(encoding="utf-8"))
    stages = []
    for stage in result["stages"]:
        artifact = store.artifact(stage["name"].split()[0], stage["identity"])
        assert artifact is not None
        kept = ("samples", "tokens", "bytes", "tau", "rounds", "peak_mb", "options", "num_train", "num_gate")
        meta = {key: artifact.meta[key] for key in kept if key in artifact.meta}
        stages.append({"stage": stage["name"], "seconds": round(artifact.seconds, 1), **meta})
    measured = {}
    for role in ("champion", "candidate"):
        if report[role]:
            keys = ("tau", "tokens", "rounds", "prompts", "acceptance_by_position", "lossless", "by_domain")
            measured[role] = {key: report[role][key] for key in keys if key in report[role]}
    decision = report["decision"]
    intervals = {key: decision[key] for key in ("tau_candidate", "tau_champion", "ratio")}
    return {
        "outcome": result["outcome"],
        "reason": result["reason"],
        "version": result["model"]["version"],
        "intervals": intervals,
        "measured": measured,
        "stages": stages,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
