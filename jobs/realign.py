"""Align a drafter with a target checkpoint: measure, and only if needed train, gate and register.

    python jobs/realign.py --target path/to/checkpoint

Exit codes: 0 promoted or certified, 2 bad input, 3 rejected by the gate, 4 held for a person,
5 another run is at the same work, 1 our own fault.
"""

from __future__ import annotations

import argparse
import json

from dflash_core.prompts.source_spec import HELP
from pipelines.cli import parse, run_job
from pipelines.config import RealignConfig


def main(argv: list[str]) -> int:
    """Run the job; returns its exit code."""
    config, options = parse(RealignConfig, argv, description=f"{__doc__}\n{HELP}", extra=_flags)
    from pipelines.events import narrate
    from pipelines.prepare import prepare

    prepared = prepare(config, narrate, make_store=not options.dry_run)
    if options.dry_run:
        from pipelines.dry_run import describe

        plan = describe(prepared)
        print(json.dumps(plan.to_json()) if options.json else plan.text())
        return 0
    from pipelines.realign import realign

    result = realign(prepared)
    print(json.dumps(result.to_json()) if options.json else result.text())
    return int(result.exit_code)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its size, and do nothing")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )


if __name__ == "__main__":
    run_job(main)
