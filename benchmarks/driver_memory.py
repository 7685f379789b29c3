"""Resident memory of a driver while a pool works off a thousand tasks, and two hundred thousand.

    python benchmarks/driver_memory.py [--out benchmarks/results/driver_memory.json]

The tasks do nothing; a stage's real bookkeeping runs: rows are counted, progress is shown, nothing is held.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from pipelines.cluster import connect, disconnect
from pipelines.pool import ActorSize, Pool
from pipelines.sharded import Totals
from pipelines.telemetry import progress

COUNTS = (1_000, 50_000, 200_000)


class Nothing:
    """A worker that does nothing and says so at the length of a real row."""

    def __call__(self, task: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": task["name"],
            "samples": 1,
            "tokens": 100,
            "bytes": 4096,
            "seconds": 0.1,
            "peak_mb": 500,
        }


def tasks(count: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"name": f"features-{number:06d}.arrow", "samples": [f"samples-{number:06d}.jsonl"]}


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    connect("local", num_cpus=2)
    pool, rows = Pool(ActorSize(0.5)), []
    for count in COUNTS:
        totals, began, most = Totals(), time.perf_counter(), 0.0
        with progress("extract", count, "samples", "0123456789ab") as bar:
            for done, row in enumerate(pool.run(Nothing, {}, tasks(count), num_actors=2)):
                totals.add(row)
                bar.advance(1, tokens=row["tokens"], bytes=row["bytes"])
                if done % 1_000 == 0:
                    most = max(most, resident_mb())
        assert totals["samples"] == count
        seconds = round(time.perf_counter() - began, 1)
        rows.append({"tasks": count, "most_resident_mb": round(most, 1), "seconds": seconds})
    pool.close()
    disconnect()
    result = {
        "command": "python benchmarks/driver_memory.py",
        "machine": {"processor": platform.processor() or platform.machine(), "ray": ray.__version__},
        "results": rows,
        "most_over_least": round(rows[-1]["most_resident_mb"] / rows[0]["most_resident_mb"], 3),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
