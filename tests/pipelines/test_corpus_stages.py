"""From sources to samples through the real stages: prompts, inspect, generate; and serving traces."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from dflash_core.checkpoints.target_guard import TargetGuard
from dflash_core.corpus.samples import read_samples
from dflash_core.errors import UserError
from dflash_core.prompts.prompt_files import load_prompts, write_prompts
from dflash_core.store.artifacts import Store
from dflash_core.toy.build import build_tiny_target
from dflash_core.toy.texts import toy_prompts
from dflash_core.types import Prompt
from pipelines import generate, inspect, prompts, traces
from pipelines.budget import resolve_budget
from pipelines.cluster import ClusterInfo
from pipelines.config import RealignConfig
from pipelines.context import Context
from pipelines.placement import Machine, place
from pipelines.stage import StageResult


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_target(tmp_path_factory.mktemp("toy") / "target").path


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    write_prompts(tmp_path / "gate.jsonl", toy_prompts(8, seed=1, split="gate"))
    return tmp_path / "gate.jsonl"


def _context(folder: Path, target: Path, **options: Any) -> Context:
    checkpoint = open_checkpoint(target)
    asked = {"generate": {"max_new_tokens": 8, "shard_prompts": 8}, "evaluate": {"max_new_tokens": 8}}
    config = RealignConfig.model_validate({"target": str(target), **asked, **options})
    config = resolve_budget(config, checkpoint.num_parameters, 0, 2)
    placement = place(config, Machine(num_cpus=2, num_gpus=0), checkpoint.num_parameters)
    store = Store.open(str(folder / "store"))
    guard = TargetGuard.of(target)
    return Context(config, store, checkpoint, guard, placement, lambda: None, lambda _event: None)


def _drawn(context: Context) -> StageResult:
    return prompts.run(context, prompts.prompt_request(context.config, None, automatic_size=True))


def test_sources_of_several_kinds_become_shards_of_samples(
    tmp_path: Path, target: Path, gate: Path, local_ray: ClusterInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = toy_prompts(80, seed=0)
    write_prompts(tmp_path / "own.jsonl", asked[:30])
    shared = [{"conversations": [{"from": "human", "value": p.turns[0]}]} for p in asked[30:]]
    pq.write_table(pa.Table.from_pylist(shared), tmp_path / "sharegpt.parquet")
    sources = [f"{tmp_path / 'own.jsonl'}?weight=1", f"{tmp_path / 'sharegpt.parquet'}?weight=3&domain=chat"]
    context = _context(tmp_path, target, prompts=sources, eval_prompts=str(gate))
    drawn = _drawn(context)
    inspected = inspect.run(context, drawn)
    meta = drawn.artifact.meta
    assert (
        inspected.artifact.meta["num_train"] == meta["num_train"] == sum(d["prompts"] for d in meta["drawn"])
    )
    assert meta["drawn"][1]["prompts"] == pytest.approx(3 * meta["drawn"][0]["prompts"], abs=3)
    assert "drawn from" in capsys.readouterr().err
    chosen = prompts.Chosen.of(meta)
    made = generate.run(context, generate.plan(context, chosen.train_fingerprint), inspected)
    samples = [
        sample
        for name in inspected.artifact.meta["train_shards"]
        for sample in read_samples(made.artifact.local(name.replace("train", "samples")))
    ]
    assert len(inspected.artifact.meta["train_shards"]) == -(-meta["num_train"] // 8) > 3
    frozen = [
        prompt
        for name in inspected.artifact.meta["train_shards"]
        for prompt in load_prompts(inspected.artifact.local(name))
    ]
    in_order = [p.id for p in frozen]
    assert [s.id for s in samples] == [i for i in in_order if i in {s.id for s in samples}]
    assert Counter(s.domain for s in samples)["chat"] > 0
    # A rerun finds all of it, and another target would find the prompts.
    assert _drawn(context).cached and inspect.run(context, drawn).cached


def test_a_prompt_file_that_changes_under_a_run_leaves_nothing_for_the_next(
    tmp_path: Path, target: Path, gate: Path
) -> None:
    asked, own = toy_prompts(20, seed=0), tmp_path / "own.jsonl"
    write_prompts(own, asked)
    context = _context(tmp_path, target, prompts=str(own), eval_prompts=str(gate))
    request = prompts.prompt_request(context.config, None, automatic_size=True)
    write_prompts(own, asked[:10])
    with pytest.raises(UserError, match=r"own\.jsonl changed while it was read"):
        prompts.run(context, request)
    write_prompts(own, asked)  # the content that was hashed, so the same identity
    found = _drawn(context)
    assert not found.cached and found.artifact.meta["num_rows"] == 20


def test_one_prompt_that_is_too_long_is_left_out_and_many_are_an_error(
    tmp_path: Path, target: Path, gate: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = toy_prompts(40, seed=0)
    endless = [Prompt(f"endless/{i}", "x", (f"{i} many words " * 2000,)) for i in range(4)]
    write_prompts(tmp_path / "p.jsonl", [*asked[:20], endless[0], *asked[20:]])
    context = _context(tmp_path, target, prompts=str(tmp_path / "p.jsonl"), eval_prompts=str(gate))
    inspected = inspect.run(context, _drawn(context)).artifact
    assert inspected.meta["num_too_long"] == 1
    kept = [p.id for name in inspected.meta["train_shards"] for p in load_prompts(inspected.local(name))]
    assert "endless/0" not in kept and len(kept) == inspected.meta["num_train"]
    told = capsys.readouterr().err
    assert "1 prompt is too long for the target's context of" in told and "('endless/0')" in told
    write_prompts(tmp_path / "p.jsonl", [*asked, *endless])
    context = _context(tmp_path, target, prompts=str(tmp_path / "p.jsonl"), eval_prompts=str(gate))
    with pytest.raises(
        UserError,
        match=r"4 of \d+ prompts are too long, such as 'endless/0', 'endless/1', 'endless/2': prompt 'endl",
    ):
        inspect.run(context, _drawn(context))


def test_thinking_needs_a_template_that_looks_at_it(tmp_path: Path, target: Path, gate: Path) -> None:
    context = _context(tmp_path, target, eval_prompts=str(gate), generate={"thinking": "both"})
    with pytest.raises(UserError, match="enable_thinking"):
        inspect.run(context, _drawn(context))


def test_a_source_that_is_read_again_is_the_same_source(tmp_path: Path, target: Path, gate: Path) -> None:
    def identity(**options: Any) -> str:
        context = _context(tmp_path, target, eval_prompts=str(gate), **options)
        return prompts.plan(prompts.prompt_request(context.config, None)).identity

    write_prompts(tmp_path / "p.jsonl", toy_prompts(40, seed=0))
    same = str(tmp_path / "p.jsonl")
    first = identity(prompts=same)
    assert identity(prompts=[same]) == identity(prompts=f"{tmp_path}/./p.jsonl") == first
    others = [
        identity(prompts=f"{same}?weight=2"),
        identity(prompts=f"{same}?domain=x"),
        identity(prompts=same, seed=1),
        identity(prompts=same, generate={"thinking": "on"}),
        identity(prompts=same, generate={"num_prompts": 7}),
    ]
    write_prompts(tmp_path / "p.jsonl", toy_prompts(41, seed=0))
    assert len({first, *others, identity(prompts=same)}) == 7


def test_a_look_at_the_prompts_leaves_no_trace(tmp_path: Path, target: Path, gate: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", toy_prompts(40, seed=0))
    context = _context(tmp_path, target, prompts=str(tmp_path / "p.jsonl"), eval_prompts=str(gate))
    request = prompts.prompt_request(context.config, None, automatic_size=True)
    before = sorted(tmp_path.rglob("*"))
    looked = prompts.look(context, request)
    assert sorted(tmp_path.rglob("*")) == before
    assert looked == prompts.Chosen.of(_drawn(context).artifact.meta) == prompts.look(context, request)


def test_traces_become_samples_without_the_target(
    tmp_path: Path, target: Path, local_ray: ClusterInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for i, prompt in enumerate(toy_prompts(300, seed=0)):
        asked = [{"role": "user", "content": f"{i}: {prompt.turns[0]} ({i * 7} {i * 13} {i * 17} {i * 23})"}]
        message = {"role": "assistant", "content": f"It is {i}.", "tool_calls": [{}] if i % 10 == 0 else None}
        choice = {"message": message, "finish_reason": "stop" if i % 2 else "length"}
        rows.append({"request": {"messages": asked}, "response": {"choices": [choice]}})
    with (tmp_path / "log.jsonl").open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    context = _context(tmp_path, target, traces=str(tmp_path / "log.jsonl"), generate={"num_prompts": 1000})
    drawn = _drawn(context)
    inspected = inspect.run(context, drawn).artifact
    assert inspected.meta["num_train"] == 0 and inspected.meta["num_gate"] > 20
    made = traces.run(context, drawn).artifact
    assert traces.run(context, drawn).cached
    files = [record.name for record in made.files if record.name.startswith("samples-")]
    samples = [sample for name in files for sample in read_samples(made.local(name))]
    left_out = made.meta["left_out"]["tool calls without token ids"]
    assert made.meta["traces"] == drawn.artifact.meta["num_train"] == len(samples) + left_out
    assert "are left out" in capsys.readouterr().err
    assert made.meta["tokens"] == sum(s.num_supervised for s in samples)
    tokenizer = load_tokenizer(context.checkpoint)
    for sample in samples:
        ((start, end),) = sample.spans
        number = int(sample.id.rpartition("/")[2]) - 1
        ending = tokenizer.eos_token if number % 2 else ""
        assert tokenizer.decode(list(sample.input_ids[start:end])) == f"It is {number}.{ending}"
    asked_at_the_gate = {p.turns[0].partition(":")[0] for p in load_prompts(inspected.local("gate.jsonl"))}
    assert not asked_at_the_gate & {str(int(s.id.rpartition("/")[2]) - 1) for s in samples}
