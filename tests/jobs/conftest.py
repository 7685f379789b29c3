"""A tiny real target with its prompts, made once, and the realignment that the tests of the jobs build on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_core.prompts.prompt_files import write_prompts
from dflash_core.toy.build import build_tiny_target
from dflash_core.toy.texts import toy_prompts

ROOT = Path(__file__).resolve().parents[2]
BUDGET = (
    *("--generate.max-new-tokens", "24", "--generate.shard-prompts", "8"),
    *("--evaluate.max-new-tokens", "24", "--gate.min-tau", "1.05"),
    *("--train.steps", "40", "--train.checkpoint-every", "10"),
)


@dataclass(frozen=True)
class Home:
    """A working folder of a user: target, prompts, and where store and registry land."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    def arguments(self, target: Path | str = "target", *more: str) -> list[str]:
        """Command line of a small realignment in this folder."""
        prompts = ("--prompts", "train.jsonl", "--eval-prompts", "gate.jsonl")
        return ["--target", str(target), *prompts, *BUDGET, *more]

    def command(self, job: str, arguments: list[str]) -> list[str]:
        return [sys.executable, str(ROOT / "jobs" / job), *arguments]

    def run(self, job: str, arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(job, arguments),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
            **options,
        )


def last_json(output: str) -> dict[str, Any]:
    """The JSON object that `--json` prints as the last line."""
    data = json.loads(output.strip().splitlines()[-1])
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "target").path


@pytest.fixture(scope="session")
def make_home(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Home]:
    """Makes working folders that share the target's files but nothing else."""

    def make(name: str) -> Home:
        folder = tmp_path_factory.mktemp(name)
        (folder / "target").mkdir()
        for file in tiny_target.iterdir():
            (folder / "target" / file.name).hardlink_to(file)
        write_prompts(folder / "train.jsonl", toy_prompts(24, seed=0))
        write_prompts(folder / "gate.jsonl", toy_prompts(8, seed=1, split="gate"))
        return Home(folder)

    return make


@pytest.fixture(scope="session")
def aligned(make_home: Callable[[str], Home]) -> tuple[Home, dict[str, Any]]:
    """A home after its first realignment, run as users run it, and what it printed."""
    home = make_home("aligned")
    done = home.run("realign.py", home.arguments("target", "--json"))
    assert done.returncode == 0, done.stderr
    return home, last_json(done.stdout)
