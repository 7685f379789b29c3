"""Which prompts train and which gate: quotas, a frozen split, no question on both sides, nothing twice."""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_core.errors import UserError
from dflash_core.prompts.draw import draw
from dflash_core.prompts.mixture import quotas
from dflash_core.prompts.overlap import NEAR, GateIndex, is_held_out
from dflash_core.prompts.prompt_choice import PromptRequest, choose
from dflash_core.prompts.prompt_files import (
    load_prompts,
    prompts_fingerprint,
    shipped_path,
    shipped_prompts,
    write_prompts,
)
from dflash_core.prompts.sources import open_sources
from dflash_core.types import Prompt

Ask = Callable[..., PromptRequest]
TEMPLATE = "A baker bakes {} trays of rolls with {} rolls on each tray. How many rolls does the baker have?"


def _questions(count: int, seed: int = 0) -> list[Prompt]:
    """Of random words, so that no two are near."""
    rng = random.Random(seed)

    def word() -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=6))

    return [Prompt(f"q/{seed}/{i}", "d", (" ".join(word() for _ in range(12)),)) for i in range(count)]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """A request; sources are lists of prompts with the query behind their names."""

    def make(
        train: dict[str, list[Prompt]], gate: list[Prompt] | None = None, **changes: Any
    ) -> PromptRequest:
        names = []
        for number, (query, prompts) in enumerate(train.items()):
            write_prompts(tmp_path / f"s{number}.jsonl", prompts)
            names.append(f"{tmp_path / f's{number}.jsonl'}{query}")
        if gate is not None:
            write_prompts(tmp_path / "gate.jsonl", gate)
        request = PromptRequest(
            train=open_sources(names),
            gate=open_sources([str(tmp_path / "gate.jsonl")]) if gate is not None else (),
            held_out_share=0.125,
            num_train=None,
            num_gate=40,
            seed=0,
            thinking="default",
        )
        return replace(request, **changes)

    return make


@pytest.fixture
def chosen(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[Prompt], list[Prompt], list[str]]]:
    """Runs a request; gives its meta, the train and the gate prompts, and what was said."""

    def run(request: PromptRequest) -> tuple[dict[str, Any], list[Prompt], list[Prompt], list[str]]:
        scratch, kept = tmp_path / "scratch", tmp_path / "kept"
        for folder in (scratch, kept):
            folder.mkdir(exist_ok=True)
            for file in folder.iterdir():
                file.unlink()
        said: list[str] = []
        meta = choose(
            request,
            scratch,
            lambda name, path: path.rename(kept / name),
            min_gate=2,
            advance=lambda _count: None,
            say=said.append,
        )
        train = [p for name in meta["train_shards"] for p in load_prompts(kept / name)]
        return meta, train, load_prompts(kept / "gate.jsonl"), said

    return run


@given(
    st.lists(st.tuples(st.integers(0, 50), st.none() | st.floats(0.01, 100)), min_size=1, max_size=5),
    st.none() | st.integers(0, 200),
)
def test_quotas_fill_the_total_within_the_sizes(
    sources: list[tuple[int, float | None]], total: int | None
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    given_ = quotas(sizes, weights, total)
    assert all(0 <= count <= size for count, size in zip(given_, sizes, strict=True))
    if total is not None:
        assert sum(given_) == min(total, sum(sizes))
    elif all(weight is None for weight in weights):
        assert given_ == sizes


@pytest.mark.parametrize(
    ("sizes", "weights", "total", "expected"),
    [
        ([100, 100], [3.0, 1.0], 40, [30, 10]),
        ([100, 100], [3.0, None], 40, [30, 10]),
        ([10, 100, 100], [2.0, 1.0, 1.0], 40, [10, 15, 15]),
        ([100, 100], [1.0, 2.0], None, [50, 100]),
        ([300, 100], [None, None], 40, [30, 10]),
        ([3, 3, 3], [1.0, 1.0, 1.0], 4, [2, 1, 1]),
        ([5, 5], [1.0, 1.0], 0, [0, 0]),
        ([0, 5], [1.0, 1.0], None, [0, 0]),
    ],
)
def test_quotas_by_hand(
    sizes: list[int], weights: list[float | None], total: int | None, expected: list[int]
) -> None:
    assert quotas(sizes, weights, total) == expected


def test_a_number_that_nobody_asked_for_does_not_bend_the_shares() -> None:
    assert quotas([100, 100], [1.0, 3.0], 160) == [60, 100]
    assert quotas([100, 100], [1.0, 3.0], 160, keep_shares=True) == [33, 100]
    assert quotas([100, 100], [1.0, 3.0], 40, keep_shares=True) == [10, 30]
    assert quotas([100, 100], [None, None], 500, keep_shares=True) == [100, 100]


def test_a_mix_by_weight_never_repeats_and_says_what_is_short(ask: Ask, chosen: Any) -> None:
    math, code = _questions(20, seed=1), _questions(100, seed=2)
    train = {"?weight=1&domain=math": math, "?weight=1&domain=code": code}
    meta, prompts, _, said = chosen(ask(train, _questions(8, seed=3), num_train=60))
    assert Counter(p.domain for p in prompts) == {"math": 20, "code": 40}
    assert len({p.turns for p in prompts}) == 60
    assert any("s0.jsonl gave all there is" in line for line in said)
    assert [d["prompts"] for d in meta["drawn"]] == [20, 40]
    # Without a number: the most that keeps the proportions.
    _, prompts, _, _ = chosen(ask({"?weight=1": math, "?weight=2": code}, _questions(8, seed=3)))
    assert Counter(p.turns[0] in {m.turns[0] for m in math} for p in prompts) == {True: 20, False: 40}


def test_a_draw_hardly_changes_when_its_source_grows(ask: Ask, chosen: Any) -> None:
    first, more = _questions(300, seed=1), _questions(30, seed=2)
    gate = _questions(8, seed=3)
    _, before, _, _ = chosen(ask({"": first}, gate, num_train=100))
    shuffled = random.Random(5).sample([*first, *more], 330)
    _, after, _, _ = chosen(ask({"": shuffled}, gate, num_train=100))
    kept = {p.turns for p in before} & {p.turns for p in after}
    assert 85 <= len(kept) < 100
    # Drawn by hash, given in the source's own order, and otherwise under another seed.
    order = [p.turns for p in shuffled]
    assert [p.turns for p in after] == sorted((p.turns for p in after), key=order.index)
    _, other, _, _ = chosen(ask({"": first}, gate, num_train=100, seed=1))
    assert {p.turns for p in other} != {p.turns for p in before}


def test_a_prompt_never_crosses_the_split_whatever_its_spelling_seed_and_company(
    ask: Ask, chosen: Any
) -> None:
    questions = _questions(400)
    _, train, gate, _ = chosen(ask({"": questions}))
    assert 25 < len(gate) <= 40 and len(train) > 300
    assert not {p.turns for p in train} & {p.turns for p in gate}
    loud = [replace(p, id=f"{p.id}!", turns=(f"  {p.turns[0].upper()}?!",)) for p in questions]
    _, louder, loud_gate, _ = chosen(ask({"": [*loud, *_questions(100, seed=9)]}, seed=7, num_gate=None))
    assert not {p.turns[0].lower() for p in train} & {p.turns[0].strip(" ?!").lower() for p in loud_gate}
    assert not {p.turns[0].strip(" ?!").lower() for p in louder} & {p.turns[0] for p in gate}
    share = sum(is_held_out(p, 0.125) for p in _questions(4000, seed=4)) / 4000
    assert share == pytest.approx(0.125, abs=0.02)


def test_what_nearly_repeats_a_gate_prompt_is_left_out_and_named(
    ask: Ask, chosen: Any, tmp_path: Path
) -> None:
    gate = _questions(8, seed=3)
    longer = replace(gate[0], id="longer", turns=(f"Please, {gate[0].turns[0]}. Think step by step.",))
    same = replace(gate[1], id="same", turns=(f"{gate[1].turns[0].upper()}!",))
    other = Prompt("talk", "d", ("and now?",))
    train = [*_questions(50), longer, same, other]
    meta, prompts, _, said = chosen(ask({"": train}, gate))
    assert meta["contamination"] == {"exact": 1, "near": 1}
    assert {p.id for p in prompts} == {p.id for p in train} - {"longer", "same"}
    rows = [json.loads(line) for line in (tmp_path / "kept" / "contamination.jsonl").open()]
    assert [(r["train"], r["gate"], r["kind"]) for r in rows] == [
        ("longer", gate[0].id, "near"),
        ("same", gate[1].id, "exact"),
    ]
    assert rows[0]["overlap"] >= NEAR
    assert sum("ask what the gate asks" in line for line in said) == 1


def test_near_is_the_same_question_and_not_the_same_template() -> None:
    index = GateIndex([Prompt("g", "d", (TEMPLATE.format(14, 36),)), Prompt("s", "d", ("Hi there",))])
    assert index.match(Prompt("t", "d", (TEMPLATE.format(14, 36) + " Explain.",))) is not None
    assert index.match(Prompt("t", "d", (TEMPLATE.format(15, 40),))) is None
    # Short texts are compared whole.
    assert index.match(Prompt("t", "d", ("hi, THERE!",))) is not None
    assert index.match(Prompt("t", "d", ("Hi there friend",))) is None
    chinese = "请用三句话介绍一下中国的长城以及它的历史"
    index = GateIndex([Prompt("c", "d", (chinese,))])
    assert index.match(Prompt("t", "d", (f"{chinese}，谢谢！",))) is not None
    assert index.match(Prompt("t", "d", ("请用三句话介绍一下日本的富士山以及它的传说",))) is None
    assert index.match(Prompt("t", "d", ("🙂",))) is None


def test_no_shipped_prompt_falls_out(ask: Ask, chosen: Any) -> None:
    sources = open_sources([str(shipped_path("train"))]), open_sources([str(shipped_path("gate"))])
    request = replace(ask({"": _questions(1)}), train=sources[0], gate=sources[1], num_gate=None)
    meta, prompts, gate, _ = chosen(request)
    assert prompts == shipped_prompts("train")
    assert gate == shipped_prompts("gate")
    assert meta["contamination"] == {"exact": 0, "near": 0}
    assert meta["train_fingerprint"] == prompts_fingerprint(prompts)
    assert meta["num_answers"] == sum(len(p.turns) for p in prompts)


def test_repeats_within_and_across_sources_are_dropped(ask: Ask, chosen: Any) -> None:
    some = _questions(20)
    again = [replace(p, id=f"again/{i}") for i, p in enumerate(some)]
    meta, prompts, _, _ = chosen(
        ask({"": [*some, *again[:5]], "?domain=x": [*again, *_questions(3, seed=5)]}, _questions(8, seed=3))
    )
    assert len(prompts) == 23 and meta["num_duplicates"] == 25
    assert [d["of"] for d in meta["drawn"]] == [20, 3]


def test_an_id_given_twice_is_an_error_that_names_both(ask: Ask, tmp_path: Path) -> None:
    request = ask({"": _questions(3)}, _questions(8, seed=3))
    with (tmp_path / "s0.jsonl").open("a") as stream:
        stream.write('{"id": "q/0/1", "prompt": "once more"}\n')
    (source,) = request.train
    with pytest.raises(UserError, match=r'id "q/0/1" to its prompts 2 and 4'):
        draw([source], None, seed=0, accept=lambda _p: True)
    (numbered,) = open_sources([f"{tmp_path / 's0.jsonl'}?id="])
    assert draw([numbered], None, seed=0, accept=lambda _p: True).sizes == (4,)


def test_bad_rows_are_counted_when_the_source_says_so(ask: Ask, chosen: Any, tmp_path: Path) -> None:
    request = ask({"": _questions(30)}, _questions(8, seed=3))
    with (tmp_path / "s0.jsonl").open("a") as stream:
        stream.write('{"messages": []}\n')
    request = replace(request, train=open_sources([str(tmp_path / "s0.jsonl")]))
    with pytest.raises(UserError, match=r"s0.jsonl line 31: no message"):
        chosen(request)
    request = replace(request, train=open_sources([f"{tmp_path / 's0.jsonl'}?skip_bad=1"]))
    meta, prompts, _, said = chosen(request)
    assert (len(prompts), meta["num_bad"]) == (30, 1)
    assert any("1 rows are no prompts" in line and "line 31" in line for line in said)


def test_gates_that_are_too_small_and_training_that_is_all_gate(ask: Ask, chosen: Any) -> None:
    few = _questions(3)
    with pytest.raises(
        UserError, match=r"0 gate prompts are too few to decide on \(12.5% of .*, held out;"
    ) as e:
        chosen(ask({"": few}))
    assert "hold more out with --evaluate.held-out-share" in str(e.value) and "--eval-prompts" in str(e.value)
    with pytest.raises(UserError, match=r"1 gate prompt is too few .*gate.jsonl; the gate wants 2\): give"):
        chosen(ask({"": few}, few[:1]))
    with pytest.raises(UserError, match=r"raise --evaluate\.num-prompts"):
        chosen(ask({"": few}, few, num_gate=1))
    near = [*few, replace(few[0], id="n", turns=(f"Please, {few[0].turns[0]}. Think step by step.",))]
    left = r"is left to train on \(of 4 rows 3 ask the same as a gate prompt, 1 ask nearly the same"
    with pytest.raises(UserError, match=left):
        chosen(ask({"": near}, few))
    everything = ask({"": few}, held_out_share=1.0)
    with pytest.raises(UserError, match="of 3 rows 3 are held out as gate prompts"):
        chosen(everything)
    unbalanced = ask({"?weight=1": few, "?weight=2": _questions(5, seed=8)}, few)
    with pytest.raises(UserError, match="weights leave nothing of the others"):
        chosen(unbalanced)


def test_thinking_makes_two_of_each_prompt_on_both_sides(ask: Ask, chosen: Any) -> None:
    request = ask({"": _questions(20)}, _questions(8, seed=3), thinking="both")
    meta, prompts, gate, _ = chosen(request)
    assert Counter(p.domain for p in prompts) == {"d/thinking": 20, "d/no-thinking": 20}
    assert Counter(p.thinking for p in gate) == {True: 8, False: 8}
    assert (meta["num_train"], meta["num_gate"]) == (40, 16)


def test_the_gates_fingerprint_depends_on_the_gate_alone(ask: Ask, chosen: Any) -> None:
    gate = _questions(8, seed=3)
    one, *_ = chosen(ask({"": _questions(20)}, gate))
    other, *_ = chosen(ask({"?domain=x": _questions(30, seed=5)}, gate, num_train=5))
    assert one["gate_fingerprint"] == other["gate_fingerprint"] == prompts_fingerprint(gate)
    assert one["train_fingerprint"] != other["train_fingerprint"]


@pytest.mark.parametrize("new", ["", '{"prompt": "something else"}', "half a l"])
@pytest.mark.parametrize("own_gate", [True, False])
def test_a_file_that_changes_while_it_is_read_is_refused(
    ask: Ask, tmp_path: Path, new: str, own_gate: bool
) -> None:
    request = ask({"": _questions(60)}, _questions(10, seed=1) if own_gate else None)

    def put(name: str, _path: Path) -> None:
        if name == "gate.jsonl":  # between the passes over the training prompts
            (tmp_path / "new").write_text(new)
            (tmp_path / "new").replace(tmp_path / "s0.jsonl")

    with pytest.raises(UserError, match=r"s0\.jsonl changed while it was read.*run again"):
        choose(request, tmp_path, put, min_gate=2, advance=lambda _count: None, say=lambda _line: None)


def test_a_file_that_changes_before_it_is_read_is_refused(ask: Ask, chosen: Any, tmp_path: Path) -> None:
    request = ask({"": _questions(60)}, _questions(10, seed=1))
    write_prompts(tmp_path / "s0.jsonl", _questions(60, seed=2))
    with pytest.raises(UserError, match=r"s0\.jsonl changed while it was read"):
        chosen(request)
    request = ask({"": _questions(60)}, _questions(10, seed=1))
    (tmp_path / "gate.jsonl").unlink()
    with pytest.raises(UserError, match=r"gate\.jsonl changed while it was read"):
        chosen(request)


def test_a_second_pass_that_lacks_what_was_drawn_is_an_error(ask: Ask, tmp_path: Path) -> None:
    (source,) = ask({"": _questions(20)}, _questions(10, seed=1)).train
    drawn = draw((source,), None, seed=0, accept=lambda _prompt: True)
    write_prompts(tmp_path / "s0.jsonl", _questions(20)[:15])
    with pytest.raises(UserError, match="gave 15 prompts when read again where 20 were drawn"):
        list(drawn.prompts())


def test_an_id_that_thinking_makes_does_not_meet_a_given_one(ask: Ask, chosen: Any) -> None:
    one, other, *rest = _questions(30)
    met = replace(other, id=f"{one.id}/thinking", thinking=True)
    with pytest.raises(UserError, match=r's0\.jsonl have the id "q/0/0/thinking"; rename'):
        chosen(ask({"": [one, met, *rest]}, _questions(10, seed=1), thinking="both"))
