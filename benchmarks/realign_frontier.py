"""What re-aligns best per unit of compute: mode, loss, anchors, learning rate and data, on toys that drifted.

    python benchmarks/realign_frontier.py --work DIR [--seeds 0,1,2] [--drifts more,style] [--cases NAME,...]
                                          [--out benchmarks/results/realign_frontier.jsonl]

Per seed: a toy target, its drafter, the same target fine-tuned, and then the drafter trained on the new
target's own answers in every way that `CASES` names. τ is that of greedy decoding, read off the chain over
the new target's answers to prompts that were never trained on (`dflash_core.training.chain`). One thread;
every result is one line, appended at once, and a rerun goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import describe

from dflash_core.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from dflash_core.checkpoints.mask_token import choose_mask_token
from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.features.feature_writer import write_shard
from dflash_core.generation.answering import answer_prompts
from dflash_core.generation.batched_decoding import BatchedEngine
from dflash_core.generation.engine import GenerationSettings
from dflash_core.models.drafter import Drafter, load_drafter, new_drafter, save_drafter
from dflash_core.models.drafter_config import config_for_target
from dflash_core.models.target import Target, load_target
from dflash_core.models.target_weights import TargetWeights
from dflash_core.toy.build import build_toy_target
from dflash_core.toy.texts import toy_prompts
from dflash_core.training.held_out import acceptance, held_out_sums
from dflash_core.training.objective import Objective
from dflash_core.training.schedules import Schedule
from dflash_core.training.trainer import Trainer, TrainOptions

BASE = TrainOptions(
    schedule=Schedule("cosine", 80, warmup_fraction=0.04, decay_fraction=0.2),
    batch_tokens=1024,
    anchors_per_sequence=16,
    objective=Objective(),
    learning_rate=6e-4,
    clip_norm=1.0,
    weight_decay=0.0,
    seed=0,
)
DRIFTS = {"more": ("plain", 20), "style": ("changed", 120)}
"""What happens to the target: some more steps on fresh texts (a moderate loss of τ), or another style of
answering (a collapse). Style and steps."""
NUM_TRAIN, NUM_GATE, NEW_TOKENS = 160, 40, 96
TARGET_STEPS, CHAMPION_STEPS = 600, 400


@dataclass(frozen=True)
class Case:
    """One way to realign."""

    options: TrainOptions
    scratch: bool = False
    prompts: int = NUM_TRAIN


def _case(*, steps: int = 80, scratch: bool = False, prompts: int = NUM_TRAIN, **changes: Any) -> Case:
    schedule = replace(BASE.schedule, steps=steps, kind=changes.pop("schedule", "cosine"))
    objective = Objective(changes.pop("loss", "ce"), changes.pop("weights", "decay"))
    return Case(replace(BASE, schedule=schedule, objective=objective, **changes), scratch, prompts)


CASES = {
    "base-40": _case(steps=40),
    "base": _case(),
    "base-160": _case(steps=160),
    "scratch-160": _case(steps=160, scratch=True),
    "scratch-400": _case(steps=400, scratch=True),
    "scratch-800": _case(steps=800, scratch=True),
    "lr-2e-3": _case(learning_rate=2e-3),
    "lr-4e-3": _case(learning_rate=4e-3),
    "muon": _case(optimizer="muon"),
    "muon-2e-3": _case(optimizer="muon", learning_rate=2e-3),
    "dpace": _case(weights="dpace"),
    "kl": _case(loss="kl"),
    "lk": _case(loss="lk"),
    "chain": _case(anchors="chain"),
    "anchors-64": _case(anchors_per_sequence=64),
    "lora-2e-3": _case(mode="lora", learning_rate=2e-3),
    "private-2e-3": _case(mode="private", learning_rate=2e-3),
    "prompts-40": _case(prompts=40),
    "wsd": _case(schedule="wsd"),
}


@dataclass(frozen=True)
class Data:
    """A target's answers, as training reads them."""

    rows: FeatureSet
    gate: FeatureSet
    embedding: torch.Tensor
    head: torch.Tensor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for targets and features, reused")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--drifts", default=",".join(DRIFTS))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/realign_frontier.jsonl"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    done = {(r["seed"], r["drift"], r["case"]) for r in _read(arguments.out)}
    for seed in map(int, arguments.seeds.split(",")):
        for drift in arguments.drifts.split(","):
            for case in arguments.cases.split(","):
                if (seed, drift, case) not in done:
                    _append(arguments.out, _run(arguments.work / f"seed-{seed}", seed, drift, case))


def _run(folder: Path, seed: int, drift: str, name: str) -> dict[str, Any]:
    champion, before = _champion(folder, seed)
    style, steps = DRIFTS[drift]
    changed = _target(folder / drift, style, steps, base=folder / "plain", seed=1000 + seed)
    data = _data(changed)
    case = CASES[name]
    stale = _tau(champion, data)
    drafter = _new(changed) if case.scratch else copy.deepcopy(champion)
    rows = data.rows if case.prompts == NUM_TRAIN else _data(changed, case.prompts).rows
    options = replace(case.options, seed=seed)
    began = time.perf_counter()
    trainer = Trainer(drafter, data.embedding, data.head, rows, options)
    reports: list[Any] = []
    trainer.run(reports.append)
    seconds = time.perf_counter() - began
    return {
        "seed": seed,
        "drift": drift,
        "case": name,
        "tau_before": before,
        "tau_stale": stale,
        "tau": _tau(trainer.finish(), data),
        "steps": len(reports),
        "tokens": sum(r.num_tokens for r in reports),
        "anchors": sum(r.num_anchors for r in reports),
        "train_seconds": round(seconds, 1),
        "options": asdict(options),
        "machine": describe(),
    }


def _champion(folder: Path, seed: int) -> tuple[Drafter, float]:
    """The drafter of the target before it changed, and its τ there."""
    plain = _target(folder / "plain", "plain", TARGET_STEPS, base=None, seed=seed)
    data = _data(plain)
    saved = folder / "champion"
    if not saved.exists():
        options = replace(BASE, schedule=replace(BASE.schedule, steps=CHAMPION_STEPS), seed=seed)
        trainer = Trainer(_new(plain), data.embedding, data.head, data.rows, options)
        trainer.run(lambda _report: None)
        save_drafter(trainer.finish(), saved)
    champion = load_drafter(saved)
    return champion, _tau(champion, data)


def _target(path: Path, style: str, steps: int, *, base: Path | None, seed: int) -> Path:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build_toy_target(path, style=style, base=base, steps=steps, seed=seed, threads=1)  # type: ignore[arg-type]
    return path


def _new(target: Path) -> Drafter:
    checkpoint = open_checkpoint(target)
    mask = choose_mask_token(checkpoint, None)
    config = config_for_target(checkpoint.config, mask_token_id=mask.id, block_size=8, num_layers=2)
    return new_drafter(config, start=TargetWeights(target), seed=0)


def _data(path: Path, num_train: int = NUM_TRAIN) -> Data:
    target = load_target(path)
    splits = {"train": toy_prompts(num_train, seed=0), "gate": toy_prompts(NUM_GATE, seed=1, split="gate")}
    sets = {name: FeatureSet([_features(path, target, name, prompts)]) for name, prompts in splits.items()}
    return Data(sets["train"], sets["gate"], target.embedding_weight, target.head_weight)


def _features(path: Path, target: Target, name: str, prompts: list[Any]) -> Path:
    shard = path.with_name(f"{path.name}-{name}-{len(prompts)}.arrow")
    if not shard.exists():
        checkpoint = open_checkpoint(path)
        settings = GenerationSettings(NEW_TOKENS, frozenset(checkpoint.eos_ids))
        engine = BatchedEngine(target, settings, batch_tokens=4096)
        answered = answer_prompts(engine, load_tokenizer(checkpoint), prompts, seed=0)
        samples = [s for a in sorted(answered, key=lambda a: a.index) for s in a.samples]
        samples.sort(key=lambda s: (len(s.input_ids), s.id))
        config = _new(path).config
        meta = FeatureMeta(
            checkpoint.fingerprint, config.target_layer_ids, config.hidden_size, last_hidden=True
        )
        write_shard(shard, meta, extract(target, samples, meta, batch_tokens=4096))
    return shard


def _tau(drafter: Drafter, data: Data) -> float:
    found = acceptance(held_out_sums(drafter, data.embedding, data.head, data.gate))
    assert found is not None
    return round(found.tau, 4)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def _append(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(result) + "\n")
    print(
        f"seed {result['seed']} {result['drift']:6} {result['case']:14} {result['tau_before']:.2f} -> "
        f"{result['tau_stale']:.2f} -> {result['tau']:.2f}  {result['tokens']:,} tokens, "
        f"{result['train_seconds']:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
