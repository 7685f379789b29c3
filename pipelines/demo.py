"""The demo's four acts: a target, its first drafter, a target that changed, a drafter that follows."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from dflash_core.errors import UserError
from dflash_core.prompts.prompt_files import write_prompts
from dflash_core.toy.build import CHANGED_STEPS, build_toy_target
from dflash_core.toy.texts import toy_prompts
from dflash_core.types import Outcome
from pipelines.config import RealignConfig
from pipelines.events import narrate
from pipelines.prepare import prepare
from pipelines.realign import realign
from pipelines.result import RealignResult
from pipelines.telemetry import progress, say

_MARKER = ".dflash-demo"
_DATABASE = "dflash-mlflow.db"
_NUM_TRAIN, _NUM_GATE = 160, 40
_TARGET_STEPS = 600
"""Fewer than the toy's own default: the story needs a target with habits, not a clever one."""


def run_demo(folder: str) -> int:
    """Play it; returns 0 if acceptance collapsed and came back, 1 if the story went otherwise."""
    began = time.monotonic()
    home = _fresh_folder(Path(folder))
    write_prompts(home / "train.jsonl", toy_prompts(_NUM_TRAIN, seed=0))
    write_prompts(home / "gate.jsonl", toy_prompts(_NUM_GATE, seed=1, split="gate"))

    say("1/4  a tiny target learns to answer questions on arithmetic, code and small talk")
    _build(home / "target-v1", base=None)
    say("2/4  its first drafter: no champion yet, so one is trained from nothing")
    first = _realign(home, "target-v1")
    say("3/4  the target is fine-tuned to another style of answering")
    _build(home / "target-v2", base=home / "target-v1")
    say("4/4  the drafter that serves is measured on the new target, and realigned")
    second = _realign(home, "target-v2")

    print(_story(home, first, second, time.monotonic() - began))
    told = first.outcome is second.outcome is Outcome.PROMOTED
    return 0 if told else 1


def _fresh_folder(home: Path) -> Path:
    """An empty folder; an earlier demo's is replaced, anybody else's is refused."""
    if home.exists():
        if not (home / _MARKER).exists():
            raise UserError(f"{home} exists and is no earlier demo's; pass another --folder")
        say(f"replacing the earlier demo in {home}")
        shutil.rmtree(home)
    home.mkdir(parents=True)
    (home / _MARKER).touch()
    return home.resolve()


def _build(path: Path, base: Path | None) -> None:
    style = "plain" if base is None else "changed"
    steps = _TARGET_STEPS if base is None else CHANGED_STEPS
    with progress(f"train {path.name}", steps, "steps") as bar:
        build_toy_target(
            path,
            style=style,  # type: ignore[arg-type]
            base=base,
            steps=steps,
            seed=0 if base is None else 1,
            progress=lambda _step, _total, loss: bar.advance(1, loss=loss),
        )


def _realign(home: Path, target: str) -> RealignResult:
    config = RealignConfig(
        target=str(home / target),
        prompts=(str(home / "train.jsonl"),),
        eval_prompts=(str(home / "gate.jsonl"),),
        store=str(home / "store"),
        tracking_uri=f"sqlite:///{home / _DATABASE}",
    )
    return realign(prepare(config, narrate))


def _story(home: Path, first: RealignResult, second: RealignResult, seconds: float) -> str:
    def row(what: str, tau: float | None, note: str) -> str:
        return f"  {what:<32} {'-' if tau is None else f'{tau:.2f}':>5}   {note}"

    name = second.model_name
    rows = (
        row("first target, first drafter", first.tau_candidate, _note(first)),
        row("changed target, same drafter", second.tau_champion, "drift: the drafter no longer fits"),
        row("changed target, realigned", second.tau_candidate, _note(second)),
    )
    table = "\n".join(rows)
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    return f"""
Mean acceptance length τ (tokens per verify round of the target; plain decoding is 1):

{table}

It took {seconds:.0f} s. Where to look next:

  report      {second.report}
  dashboard   {python} -m dashboards --tracking-uri sqlite:///{home / _DATABASE}
  drafter     models:/{name}@champion
  your own    {python} jobs/realign.py --target path/to/checkpoint
"""


def _note(result: RealignResult) -> str:
    return f"{result.outcome} as version {result.model_version}"
