"""Measure the acceptance of a drafter directory on a target directory.

    python jobs/evaluate.py --target path/to/checkpoint --drafter path/to/drafter

Prints a table and the acceptance by position. Exit codes: 0 measured, 2 bad input, 1 our own fault.
"""

from __future__ import annotations

import argparse
import json

from dflash_core.prompts.source_spec import HELP
from pipelines.cli import parse, run_job
from pipelines.measure_config import MeasureConfig


def main(argv: list[str]) -> int:
    """Run the job; returns its exit code."""
    config, options = parse(MeasureConfig, argv, description=f"{__doc__}\n{HELP}", extra=_flags)
    from dflash_core.decoding.acceptance import format_table, summary_json
    from pipelines.measure import measure

    report = measure(config)
    print(json.dumps(summary_json(report)) if options.json else format_table(report))
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )


if __name__ == "__main__":
    run_job(main)
