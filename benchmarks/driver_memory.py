"""Resident memory of a driver while a pool works off two hundred thousand tasks: after few, and after all.

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

MOMENTS = (1_000, 10_000, 50_000, 100_000, 150_000, 200_000)


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
    pool, totals, began = Pool(ActorSize(0.5)), Totals(), time.perf_counter()
    rows: list[dict[str, float]] = []
    with progress("extract", MOMENTS[-1], "samples", "0123456789ab") as bar:
        for done, row in enumerate(pool.run(Nothing, {}, tasks(MOMENTS[-1]), num_actors=2), start=1):
            totals.add(row)
            bar.advance(1, tokens=row["tokens"], bytes=row["bytes"])
            if done in MOMENTS:
                seconds = round(time.perf_counter() - began, 1)
                rows.append({"tasks": done, "resident_mb": round(resident_mb(), 1), "seconds": seconds})
                write(rows, options.out)
    assert totals["samples"] == MOMENTS[-1]
    pool.close()
    disconnect()


def write(rows: list[dict[str, float]], out: Path | None) -> None:
    result = {
        "command": "python benchmarks/driver_memory.py",
        "machine": {"processor": platform.processor() or platform.machine(), "ray": ray.__version__},
        "results": rows,
        "last_over_first": round(rows[-1]["resident_mb"] / rows[0]["resident_mb"], 3),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
