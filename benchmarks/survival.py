"""Kill actors, drivers and Ray itself at random moments of generation and extraction; see what is redone.

    python benchmarks/survival.py [--victim driver] [--first 0] [--moments 10]
                                  [--out benchmarks/results/survival.json]

A run generates and extracts for a tiny target, from many small shards, with two actors on a Ray of its own.
It is hit by SIGKILL once a number of rows, drawn with a seed, is on disk and a drawn fraction of a second has
passed; where the run does not go on by itself it is started again. In the end every samples and features file
must be byte-identical to an undisturbed run's, and of the shards that stood there at the kill at most those
in flight, one an actor, may have been made again. With --out what the file knows of other kills is kept, so
the moments can be tried in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_ACTORS = 2
VICTIMS = ("actor", "driver", "head")
STAGES = ("generate", "extract")


@dataclass(frozen=True)
class Home:
    """A target, prompts and the store of one run."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def rows(self) -> int:
        """Manifest rows on disk, of both stages."""
        return sum(1 for stage in STAGES for _ in self.store.glob(f"{stage}/*/rows/*.json"))

    def shards(self) -> dict[str, tuple[int, int]]:
        """Shards on disk, and what tells when each was made."""
        found = {}
        for stage in STAGES:
            for path in self.store.glob(f"{stage}/*/[!.]*-?????.*"):
                status = path.stat()
                found[path.name] = (status.st_ino, status.st_mtime_ns)
        return found

    def digests(self) -> dict[str, str]:
        """sha256 of every committed shard."""
        committed = [p.parent for stage in STAGES for p in self.store.glob(f"{stage}/*/_SUCCESS")]
        paths = sorted(path for folder in committed for path in folder.glob("[!.]*-?????.*"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--victim", choices=VICTIMS, help="only this kind of kill")
    parser.add_argument("--first", type=int, default=0, help="number of the first moment")
    parser.add_argument("--moments", type=int, default=10, help="of each kind of kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        original = make_home(Path(folder) / "whole")
        whole = undisturbed(original)
        known = json.loads(options.out.read_text("utf-8")) if options.out and options.out.exists() else {}
        results: dict[str, dict[str, Any]] = known.get("each", {})
        for victim in VICTIMS if options.victim is None else (options.victim,):
            for moment in range(options.first, options.first + options.moments):
                draw = random.Random(f"{options.seed} {victim} {moment}")
                results.setdefault(victim, {})[str(moment)] = killed_once(original, whole, victim, draw)
                write(results, len(whole), options.out)


def write(results: dict[str, dict[str, Any]], num_shards: int, out: Path | None) -> None:
    """After every kill: a run that is cut short has told what it saw."""
    result = {
        "command": "python benchmarks/survival.py",
        "machine": {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()},
        "shards": num_shards,
        "actors": NUM_ACTORS,
        "kills": {victim: summary(list(kills.values())) for victim, kills in results.items()},
        "each": results,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if out:
        out.write_text(text + "\n", encoding="utf-8")


def summary(kills: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "moments": len(kills),
        "identical": sum(kill["identical"] for kill in kills),
        "most_shards_redone": max(kill["redone"] for kill in kills),
    }


def make_home(folder: Path) -> Home:
    """The target is untrained: its answers run to the length limit."""
    from dflash_core.prompts.prompt_files import write_prompts
    from dflash_core.toy.build import build_tiny_target
    from dflash_core.toy.texts import toy_prompts

    folder.mkdir(parents=True)
    build_tiny_target(folder / "target")
    write_prompts(folder / "train.jsonl", toy_prompts(48, seed=0))
    write_prompts(folder / "gate.jsonl", toy_prompts(8, seed=1, split="gate"))
    return Home(folder)


def undisturbed(home: Home) -> dict[str, str]:
    """Shards of a run that nothing happened to."""
    run = start(home)
    if run.wait(300):
        raise SystemExit(f"the undisturbed run failed: {(home.folder / 'log').read_text()[-2000:]}")
    whole = home.digests()
    shutil.rmtree(home.store)
    return whole


def killed_once(original: Home, whole: dict[str, str], victim: str, draw: random.Random) -> dict[str, Any]:
    """One run, killed at a random moment and brought to its end."""
    home = original
    shutil.rmtree(home.store, ignore_errors=True)
    # Rows of both stages: between two and all but a few, so that there is something to kill.
    wanted = draw.randrange(1, len(whole) - 3)
    run = start(home)
    while home.rows() < wanted and run.poll() is None:
        time.sleep(0.005)
    time.sleep(draw.random() * 0.1)
    at_kill, rows = home.shards(), home.rows()
    hit = kill(run, victim, draw)
    code = run.wait(300)
    end_session(run.pid)
    reruns = 0
    while code != 0:
        reruns += 1
        if reruns > 2:
            raise SystemExit(f"no rerun succeeded: {(home.folder / 'log').read_text()[-2000:]}")
        again = start(home)
        code = again.wait(300)
        end_session(again.pid)
    after = home.shards()
    return {
        "rows_at_kill": rows,
        "processes_killed": hit,
        "exit_code": run.returncode,
        "reruns": reruns,
        "redone": sum(after[name] != made for name, made in at_kill.items()),
        "identical": home.digests() == whole,
    }


def start(home: Home) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with (home.folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", "from benchmarks.survival import child; child()", str(home.folder)],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def child() -> None:
    """Generate and extract, as a realignment does."""
    from pipelines import extract, generate, inspect, prompts
    from pipelines.cli import run_job
    from pipelines.config import RealignConfig
    from pipelines.events import narrate
    from pipelines.prepare import prepare

    def main(arguments: list[str]) -> int:
        folder = arguments[0]
        config = RealignConfig.model_validate(
            {
                "target": f"{folder}/target",
                "prompts": (f"{folder}/train.jsonl",),
                "eval_prompts": (f"{folder}/gate.jsonl",),
                "store": f"{folder}/store",
                "tracking_uri": f"sqlite:///{folder}/mlflow.db",
                "device": "cpu",
                "generate": {"max_new_tokens": 24, "shard_prompts": 2},
                "extract": {"shard_tokens": 150},
                "resources": {"actors": NUM_ACTORS, "threads": 1},
            }
        )
        prepared = prepare(config, narrate)
        context = prepared.context
        drawn = prompts.run(context, prepared.prompts)
        chosen = prompts.Chosen.of(drawn.artifact.meta)
        inspected = inspect.run(context, drawn)
        generated = generate.run(context, generate.plan(context, chosen.train_fingerprint), inspected)
        layers = prepared.shape.target_layer_ids
        extract.run(context, extract.plan(context, generated.identity, layers), generated)
        return 0

    run_job(main)


def kill(run: subprocess.Popen[bytes], victim: str, draw: random.Random) -> int:
    """SIGKILL; how many processes it hit."""
    commands = {
        "actor": lambda command: command.startswith("ray::_Actor"),
        "head": lambda command: "raylet/raylet" in command or "gcs_server" in command,
    }
    if victim == "driver":
        run.kill()
        return 1
    hit = [pid for pid, command in processes_of(run.pid) if commands[victim](command)]
    if victim == "actor" and hit:
        hit = [draw.choice(hit)]
    for pid in hit:
        os.kill(pid, signal.SIGKILL)
    return len(hit)


def processes_of(session: int) -> list[tuple[int, str]]:
    """Living processes of a session: pid and command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append((int(entry.name), command))
    return found


def end_session(session: int) -> None:
    """What a killed run's Ray has not ended itself."""
    for pid, _ in processes_of(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
