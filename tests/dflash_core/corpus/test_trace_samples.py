"""Logged answers as samples: supervision at the exact tokens, and what cannot be exact left out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.corpus.trace_rows import read_trace_row, to_traces, trace_row
from dflash_core.corpus.trace_samples import TraceRenderer, template_sha256
from dflash_core.errors import UserError
from dflash_core.prompts.prompt_choice import PromptRequest, choose
from dflash_core.prompts.prompt_files import load_prompts
from dflash_core.prompts.source_spec import SourceSpec
from dflash_core.prompts.sources import open_sources
from dflash_core.types import Sample, Trace
from tests.dflash_core.chat_tokenizers import MAX_POSITIONS, PLAIN, THINKING, chat_tokenizer, checkpoint_of

SPEC = SourceSpec("log.jsonl", traces=True)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def _exchange(
    messages: list[dict], message: dict, finish: str | None = "stop", **more: Any
) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": finish, **more}
    return {"request": {"model": "m", "messages": messages}, "response": {"id": "r", "choices": [choice]}}


def _traces(*rows: dict[str, Any]) -> list[Trace]:
    return [t for i, row in enumerate(rows, 1) for t in to_traces(row, f"log row {i}", f"log/{i}", SPEC)]


class _Served:
    """A tokenizer, and what becomes of traces under its template."""

    def __init__(self, template: str) -> None:
        self.tokenizer = chat_tokenizer(template)
        self.checkpoint = checkpoint_of(self.tokenizer)
        self.renderer = TraceRenderer(self.checkpoint, self.tokenizer)

    def samples(self, *rows: dict[str, Any]) -> list[Sample]:
        return list(self.renderer.samples(_traces(*rows)))

    def spans(self, sample: Sample) -> list[str]:
        """The texts that are supervised."""
        return [self.tokenizer.decode(list(sample.input_ids[a:b])) for a, b in sample.spans]

    def text(self, sample: Sample) -> str:
        return str(self.tokenizer.decode(list(sample.input_ids)))

    def prompt_ids(self, messages: list[dict], **more: Any) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **more
        )
        return list(ids)


@pytest.fixture
def plain() -> Iterator[_Served]:
    yield _Served(PLAIN)


@pytest.fixture
def thinking() -> Iterator[_Served]:
    yield _Served(THINKING)


def test_an_exchange_is_the_rendered_prompt_the_answer_and_its_stop_token(plain: _Served) -> None:
    (sample,) = plain.samples(_exchange([_user("1+2?")], _answer("three é")))
    assert plain.text(sample) == "<|start|>user\n1+2?<|end|>\n<|start|>assistant\nthree é<|end|>"
    assert plain.spans(sample) == ["three é<|end|>"]
    assert sample.input_ids[: sample.spans[0][0]] == tuple(plain.prompt_ids([_user("1+2?")]))


def test_the_answer_is_found_by_its_place_even_where_the_prompt_says_the_same(plain: _Served) -> None:
    (sample,) = plain.samples(_exchange([_user("say: three<|end|>")], _answer("three")))
    start, end = sample.spans[0]
    assert (plain.spans(sample), end) == (["three<|end|>"], len(sample.input_ids))
    assert start == len(plain.prompt_ids([_user("say: three<|end|>")]))


@pytest.mark.parametrize(
    ("finish", "more", "ending"),
    [
        ("stop", {}, "<|end|>"),
        (None, {}, "<|end|>"),
        ("length", {}, ""),
        ("content_filter", {}, ""),
        ("stop", {"stop_reason": "\n\n"}, ""),
        ("stop", {"stop_reason": 3}, "<|end|>"),
    ],
)
def test_a_stop_token_stands_where_one_was_generated(
    plain: _Served, finish: str | None, more: dict[str, Any], ending: str
) -> None:
    (sample,) = plain.samples(_exchange([_user("x")], _answer("ab"), finish, **more))
    assert plain.spans(sample) == [f"ab{ending}"]


def test_token_ids_count_before_text(plain: _Served) -> None:
    prompt = plain.prompt_ids([_user("x")])
    row = _exchange([_user("x")], _answer("what a parser left"), token_ids=[65, 66, 300 % 260])
    row["response"]["prompt_token_ids"] = prompt
    (sample,) = plain.samples(row)
    assert sample.input_ids == (*prompt, 65, 66, 300 % 260)
    assert sample.spans == ((len(prompt), len(prompt) + 3),)
    (sample,) = plain.samples({"prompt_token_ids": [7, 8, 9], "response_token_ids": [1, 2]})
    assert (sample.input_ids, sample.spans) == ((7, 8, 9, 1, 2), ((3, 5),))


def test_all_answers_of_a_logged_conversation_are_one_sample(plain: _Served) -> None:
    talk = [_user("a"), _answer("one"), _user("b"), _answer("two")]
    (sample,) = plain.samples({"id": "t", "messages": talk})
    assert plain.spans(sample) == ["one<|end|>", "two<|end|>"]
    assert sample.id == "t"
    whole = plain.tokenizer.apply_chat_template(talk, tokenize=False)
    assert whole == plain.text(sample) + "\n"


def test_exchanges_of_a_conversation_meet_in_any_order_and_others_do_not(plain: _Served) -> None:
    later = _exchange([_user("a"), _answer("one"), _user("b")], _answer("two"))
    first, other = _exchange([_user("a")], _answer("one")), _exchange([_user("a")], _answer("uno"))
    found = {tuple(plain.spans(s)) for s in plain.samples(later, other, first)}
    assert found == {("one<|end|>", "two<|end|>"), ("uno<|end|>",)}
    # Alone, the later one vouches for its own answer only.
    (sample,) = plain.samples(later)
    assert plain.spans(sample) == ["two<|end|>"]


def test_an_answer_cut_at_its_length_still_stands_in_the_next_turns_prompt(plain: _Served) -> None:
    first = _exchange([_user("a")], _answer("on"), "length")
    later = _exchange([_user("a"), _answer("on"), _user("b")], _answer("two"))
    (sample,) = plain.samples(first, later)
    assert plain.spans(sample) == ["on", "two<|end|>"]


def test_where_a_template_drops_earlier_thinking_the_turns_stay_apart(thinking: _Served) -> None:
    said = "<think>\nhm\n</think>\n\none"
    first = _exchange([_user("a")], _answer(said))
    later = _exchange([_user("a"), _answer(said), _user("b")], _answer("<think>\nso\n</think>\n\ntwo"))
    samples = thinking.samples(first, later)
    assert sorted(thinking.spans(s)[0] for s in samples) == [
        f"{said}<|end|>",
        "<think>\nso\n</think>\n\ntwo<|end|>",
    ]
    assert all(len(s.spans) == 1 for s in samples)


def test_an_empty_think_block_is_never_supervised(thinking: _Served) -> None:
    # In the prompt, where the template puts it ...
    row = _exchange([_user("a")], _answer("one"))
    row["request"]["chat_template_kwargs"] = {"enable_thinking": False}
    (sample,) = thinking.samples(row)
    assert thinking.text(sample).endswith("assistant\n<think>\n\n</think>\n\none<|end|>")
    assert thinking.spans(sample) == ["one<|end|>"]
    # ... and at the head of an answer, where an engine logged it, as text or as ids.
    (sample,) = thinking.samples(_exchange([_user("a")], _answer("<think>\n\n</think>\n\none")))
    assert thinking.spans(sample) == ["one<|end|>"]
    ids = thinking.tokenizer.encode("<think>\n\n</think>\n\none<|end|>")
    (sample,) = thinking.samples({"prompt_token_ids": [1, 2], "token_ids": ids})
    assert thinking.spans(sample) == ["one<|end|>"]
    # A block with something in it was generated.
    (sample,) = thinking.samples(_exchange([_user("a")], _answer("<think>\nhm\n</think>\n\none")))
    assert thinking.spans(sample) == ["<think>\nhm\n</think>\n\none<|end|>"]


def test_what_cannot_be_exact_is_left_out_and_counted(plain: _Served) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        _exchange([_user("a")], {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"),
        _exchange([_user("b")], _answer("x", reasoning_content="hm")),
        _exchange([_user("c")], _answer("")),
        _exchange([_user("d")], _answer("y" * MAX_POSITIONS)),
        _exchange([_user("e")], _answer("la " * 100), "length"),
        _exchange([_user("f")], _answer("fine")),
    ]
    assert [plain.spans(s) for s in plain.samples(*rows)] == [["fine<|end|>"]]
    assert sum(plain.renderer.left_out.values()) == 5
    assert len(plain.renderer.left_out) == 5
    # With the ids that were generated a call is as good as any answer.
    rows[0]["response"]["choices"][0]["token_ids"] = [3, 4]
    assert plain.samples(rows[0])[0].input_ids[-2:] == (3, 4)


def test_an_answer_whose_tokens_read_otherwise_is_left_out() -> None:
    served = _Served(PLAIN)
    served.tokenizer.backend_tokenizer.normalizer = __import__("tokenizers").normalizers.Lowercase()
    assert served.samples(_exchange([_user("a")], _answer("SHOUT")), _exchange([_user("b")], _answer("ok")))
    assert dict(served.renderer.left_out) == {"answers whose tokens do not decode back to their text": 1}


def test_prompts_served_with_another_template_are_refused_as_a_rule_and_counted_as_an_exception(
    plain: _Served,
) -> None:
    def logged(count: int, wrong: int) -> list[dict[str, Any]]:
        rows = []
        for i in range(count):
            row = _exchange([_user(f"q{i}")], _answer("x"), token_ids=[1, 2])
            right = plain.prompt_ids([_user(f"q{i}")])
            row["response"]["prompt_token_ids"] = right[1:] if i < wrong else right
            rows.append(row)
        return rows

    assert len(plain.samples(*logged(20, 1))) == 19
    assert (plain.renderer.num_compared, plain.renderer.num_mismatched) == (20, 1)
    with pytest.raises(UserError, match="--chat-template") as caught:
        _Served(PLAIN).samples(*logged(20, 20))
    ids = plain.prompt_ids([_user("q0")])
    found = f"at position 0, expected {ids[0]} and found {ids[1]}"
    assert "(first trace log/" in str(caught.value) and found in str(caught.value)
    assert _Served(PLAIN).samples(*logged(7, 6))  # too few to say, until they are counted at the end


def test_another_templates_hash_and_another_vocabulary_are_refused(plain: _Served) -> None:
    row = {**_exchange([_user("a")], _answer("x")), "chat_template_sha256": template_sha256(plain.checkpoint)}
    assert plain.samples(row)
    with pytest.raises(UserError, match="--chat-template"):
        plain.samples({**row, "chat_template_sha256": "0" * 64})
    with pytest.raises(UserError, match="vocabulary"):
        plain.samples({"prompt_token_ids": [1], "token_ids": [len(plain.tokenizer)]})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [_user("x")]}, "do not end with the assistant's"),
        ({"request": {"messages": [_user("x")]}, "response": {"choices": []}}, "no choice"),
        ({"request": {"messages": [_user("x"), _answer("y")]}, "response": {}}, "ends with the assistant's"),
        ({"prompt_token_ids": [1]}, "but no answer's"),
        ({"prompt_token_ids": [1, "x"], "token_ids": [2]}, "log plain ids"),
        ({"prompt": "x"}, 'is no trace, it has "prompt"'),
        ({"request": json.dumps({"messages": []}), "response": {}}, '"request" is an object.s JSON as text'),
        ({"request": {}, "response": ' {"choices": []}'}, '"response" is an object.s JSON as text'),
    ],
)
def test_a_row_that_is_no_trace_is_named(row: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        _traces(row)
    assert str(caught.value).startswith("log row 1")


def test_batch_files_envelopes_are_opened() -> None:
    row = _exchange([_user("x")], _answer("y"))
    wrapped = {"id": "b", "request": {"body": row["request"]}, "response": {"body": row["response"]}}
    assert _traces(wrapped) == [replace(_traces(row)[0], id="b")]


def test_traces_are_read_back_equal() -> None:
    agent = [
        _user("x"),
        _answer(
            "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]
        ),
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    rows = [
        _exchange(agent, _answer("y"), "length", token_ids=[1, 2]),
        {"messages": [_user("x"), _answer("y")], "thinking": True, "chat_template_sha256": "ab"},
        {"prompt_token_ids": [1], "token_ids": [2]},
    ]
    for trace in _traces(*rows):
        assert read_trace_row(json.dumps(trace_row(trace))) == trace


def test_a_conversation_stays_on_its_side_of_the_split_and_in_one_shard(tmp_path: Path) -> None:
    rows = []
    for i in range(600):
        first = [_user(f"question number {i} about {i * i} things")]
        talk = [*first, _answer(f"answer {i}"), _user("and then?")]
        rows += [_exchange(first, _answer(f"answer {i}")), _exchange(talk, _answer(f"more {i}"))]
    with (tmp_path / "log.jsonl").open("w") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
    request = PromptRequest(
        train=open_sources([f"{tmp_path / 'log.jsonl'}?id="], traces=True),
        gate=(),
        held_out_share=0.125,
        num_train=None,
        num_gate=None,
        seed=0,
        thinking="default",
    )
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "scratch").mkdir()
    meta = choose(
        request,
        tmp_path / "scratch",
        lambda name, path: path.rename(kept / name),
        min_gate=2,
        advance=lambda _count: None,
        say=lambda _line: None,
    )
    gate = load_prompts(kept / "gate.jsonl")
    shards = {
        name: [read_trace_row(line) for line in (kept / name).open(encoding="utf-8")]
        for name in meta["train_shards"]
    }
    assert len(shards) > 2 and sum(map(len, shards.values())) == meta["num_train"]
    assert meta["num_train"] + len(gate) == len(rows)

    def number(prompt: Any) -> str:
        asked = [m.content for m in prompt.history if m.role == "user"] or list(prompt.turns)
        return str(asked[0].split()[2])

    sides = {number(p) for p in gate}, *({number(t) for t in shard} for shard in shards.values())
    assert sum(map(len, sides)) == 600 == len(set.union(*sides))
    # The draw takes conversations whole.
    some = replace(request, num_train=100)
    for file in [*kept.iterdir(), *(tmp_path / "scratch").iterdir()]:
        file.unlink()
    meta = choose(
        some,
        tmp_path / "scratch",
        lambda name, path: path.rename(kept / name),
        min_gate=2,
        advance=lambda _count: None,
        say=lambda _line: None,
    )
    drawn = [number(read_trace_row(line)) for file in kept.glob("traces-*") for line in file.open()]
    assert len(drawn) == 100 and len(set(drawn)) == 50


def test_token_ids_alone_cannot_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"prompt_token_ids": [1], "token_ids": [2]}\n')
    sources = open_sources([str(tmp_path / "log.jsonl")], traces=True)
    request = PromptRequest(sources, (), 0.125, None, None, 0, "default")
    with pytest.raises(UserError, match="--eval-prompts"):
        choose(request, tmp_path, lambda _n, _p: None, min_gate=2, advance=lambda _c: None, say=print)
