"""Remove stage outputs that no registered drafter and no running job needs; shows first, acts on --delete.

    python jobs/prune.py --older-than 14d --keep-bytes 500GB

Exit codes: 0 shown or removed, 2 bad input or a registry that cannot be asked, 1 our own fault.
"""

from __future__ import annotations

import argparse
import json

from pipelines.cli import parse, run_job
from pipelines.prune_config import PruneConfig


def main(argv: list[str]) -> int:
    """Run the job; returns its exit code."""
    config, options = parse(PruneConfig, argv, description=__doc__ or "", extra=_flags)
    from pipelines.prune import prune

    pruning = prune(config, delete=options.delete)
    print(json.dumps(pruning.to_json()) if options.json else pruning.text())
    return 0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delete", action="store_true", help="do it; without this it is only shown")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line of stdout"
    )


if __name__ == "__main__":
    run_job(main)
