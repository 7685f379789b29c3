"""The whole story in a few minutes, on any machine, without a download beyond the packages.

    python jobs/demo.py

Builds a tiny real target, trains its first drafter, fine-tunes the target to another style, shows that
acceptance collapses, realigns, and shows that it is back. Everything lands in `dflash-demo/`.
"""

from __future__ import annotations

import argparse

from pipelines.cli import run_job


def main(argv: list[str]) -> int:
    """Run the demo; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", default="dflash-demo", help="where everything lands (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    from pipelines.demo import run_demo

    return run_demo(options.folder)


if __name__ == "__main__":
    run_job(main, after_interrupt="the demo starts over when it is run again")
