"""Reading prompts: both formats, every mistake named by file and line, a round trip; and what is shipped."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import MAX_LINE_BYTES
from dflash_core.prompts.prompt_files import (
    load_prompts,
    prompts_fingerprint,
    shipped_prompts,
    write_prompts,
)
from dflash_core.types import Message, Prompt

DOMAINS = ("arithmetic", "reasoning", "code", "chat", "extraction", "writing", "chinese")


def _file(folder: Path, *lines: str | dict | bytes) -> Path:
    path = folder / "asked.jsonl"
    rows = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(row.encode() if isinstance(row, str) else row for row in rows))
    return path


def _message(role: str, content: object) -> dict:
    return {"role": role, "content": content}


def _refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_prompts(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert "\n" not in sentence
    return sentence


def test_turns(tmp_path: Path) -> None:
    path = _file(tmp_path, {"id": "a", "domain": "code", "turns": ["one", " two\n"], "score": 3})
    assert load_prompts(path) == [Prompt("a", "code", ("one", " two\n"))]


def test_labels_left_out_come_from_the_file_and_the_line(tmp_path: Path) -> None:
    path = _file(tmp_path, {"turns": ["x"]}, "", "   ", {"id": 7, "domain": None, "turns": ["y"]}, "\r", "")
    assert load_prompts(path) == [Prompt("asked/1", "default", ("x",)), Prompt("7", "default", ("y",))]


def test_messages_before_the_last_question_are_history_and_its_answer_is_dropped(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "and "}, {"type": "text", "text": "2?"}]
    messages = [
        _message("system", "be brief"),
        _message("user", "1?"),
        _message("assistant", "one"),
        _message("user", parts),
        _message("assistant", None),
    ]
    history = (Message("system", "be brief"), Message("user", "1?"), Message("assistant", "one"))
    assert load_prompts(_file(tmp_path, {"messages": messages})) == [
        Prompt("asked/1", "default", ("and 2?",), history)
    ]


def test_a_byte_order_mark_windows_line_ends_and_escaped_pairs_are_read(tmp_path: Path) -> None:
    path = _file(
        tmp_path, b'\xef\xbb\xbf{"turns": ["\\ud83d\\ude00 \xe4\xbd\xa0"]}\r', '{"turns": ["b"]}\r\n'
    )
    assert [p.turns for p in load_prompts(path)] == [("😀 你",), ("b",)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'turns': ['single quotes']}", ["line 2", "not JSON", "column 2"]),
        ('{"turns": ["cut off', ["line 2", "not JSON"]),
        ('["a list"]', ["line 2", "a JSON list", "an object"]),
        ('"text"', ["line 2", "a JSON string"]),
        ("[" * 200_000, ["line 2", "too deeply"]),
        ('{"turns": ["\\ud800"]}', ["line 2", "surrogate"]),
        ({}, ["line 2", "no keys at all", '"turns"', '"messages"']),
        ({"id": "a", "turn": ["x"]}, ["line 2", '"id", "turn"', 'mean "turns" by "turn"']),
        ({"question": "x"}, ["line 2", 'mean "prompt" by "question"', "?prompt=question"]),
        ({"prompt": 3}, ["line 2: the prompt", "a JSON number"]),
        ({"conversations": []}, ["line 2", 'the role "user"']),
        ({"conversations": [{"from": "alien", "value": "x"}]}, ["line 2: message 1", '"alien"', "human"]),
        ({"Mesages": []}, ["line 2", 'mean "messages" by "Mesages"']),
        ({"zebra": 1}, ["line 2", 'but "zebra"; give it']),
        (
            {"id": "a", "frage": "x", "antwort": "y"},
            ["line 2", 'if "frage" is', "?prompt=frage", "or give it"],
        ),
        ({"turns": ["x"], "messages": []}, ["line 2", "both"]),
        ({"turns": "x"}, ["line 2", '"turns" is a JSON string', "list of texts"]),
        ({"turns": []}, ["line 2", '"turns" is empty']),
        ({"turns": ["x", 5]}, ["line 2: turn 2", "a JSON number"]),
        ({"turns": [" \t\n"]}, ["line 2: turn 1 is blank"]),
        ({"id": " ", "turns": ["x"]}, ["line 2", '"id" is blank']),
        ({"id": True, "turns": ["x"]}, ["line 2", '"id" is a JSON boolean']),
        ({"domain": ["a"], "turns": ["x"]}, ["line 2", '"domain" is a JSON list']),
        ({"messages": {}}, ["line 2", '"messages" is a JSON object']),
        ({"messages": []}, ["line 2", 'the role "user"']),
        ({"messages": [_message("assistant", "x")]}, ["line 2", 'the role "user"']),
        ({"messages": ["x"]}, ["line 2: message 1", "a JSON string"]),
        ({"messages": [_message("tool", "x")]}, ["line 2", 'the role "user"']),
        ({"messages": [_message("robot", "x")]}, ["line 2: message 1", '"robot"', "user, assistant, tool"]),
        ({"prompt": "x", "tools": "{"}, ["line 2", '"tools"', "no JSON"]),
        ({"prompt": "x", "tools": ["x"]}, ["line 2", '"tools" is no list of objects']),
        ({"messages": [{"content": "x"}]}, ["line 2: message 1", "no role"]),
        ({"messages": [_message("user", None)]}, ["line 2: message 1", "a JSON null"]),
        ({"messages": [_message("system", ""), _message("user", "x")]}, ["line 2: message 1 is blank"]),
        ({"messages": [_message("user", [])]}, ["line 2: message 1 is blank"]),
        ({"messages": [_message("user", [{"type": "image_url"}])]}, ["line 2: message 1", "not text"]),
        ({"messages": [_message("user", [{"type": "text", "text": 1}])]}, ["line 2: message 1", "not text"]),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str | dict, said: list[str]) -> None:
    sentence = _refusal(_file(tmp_path, {"turns": ["fine"]}, line))
    for words in said:
        assert words in sentence
    assert len(sentence) < 600


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    rows = [{"id": "asked/2", "turns": ["x"]}, "", {"turns": ["y"]}]
    assert '"asked/2" on line 1 and on line 3' in _refusal(_file(tmp_path, *rows))


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"])
def test_a_file_without_prompts(tmp_path: Path, content: bytes) -> None:
    assert "holds no prompts" in _refusal(_file(tmp_path, content))


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"turns": ["fine"]}', '{"turns": ["café"]}'.encode("latin-1"))
    assert "not UTF-8 text (see line 2)" in _refusal(path)


def test_a_missing_file_a_directory_and_a_name_too_long(tmp_path: Path) -> None:
    assert "no prompt file" in _refusal(tmp_path / "none.jsonl")
    assert "is a directory" in _refusal(tmp_path)
    assert "cannot be read" in _refusal(tmp_path / ("x" * 300))


def test_a_line_of_absurd_size_is_refused_and_one_of_the_longest_size_is_not(tmp_path: Path) -> None:
    frame = len('{"turns": [""]}\n')
    path = _file(tmp_path, {"turns": ["x" * (MAX_LINE_BYTES - frame)]}, {"turns": ["y"]})
    assert len(load_prompts(path)) == 2
    path = _file(tmp_path, {"turns": ["fine"]}, {"turns": ["x" * MAX_LINE_BYTES]})
    assert "line 2 is longer than 4 MiB" in _refusal(path)


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs a device without an end")
def test_a_device_without_an_end_is_refused() -> None:
    assert "line 1 is longer" in _refusal(Path("/dev/zero"))


PROMPTS = [
    Prompt("a/1", "code", ('tab\t, line\u2028end, quote " and \\',)),
    Prompt("二", "chinese", ("你好\n\n再见", "第二轮")),
    Prompt(
        "c", "default", ("last?",), (Message("system", "s"), Message("user", "u"), Message("assistant", "a"))
    ),
]


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_prompts(path, PROMPTS)
    assert load_prompts(path) == PROMPTS
    assert "你好" in path.read_text("utf-8")
    write_prompts(path, PROMPTS[:1])
    assert load_prompts(path) == PROMPTS[:1]
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_prompts(path, PROMPTS)
    with pytest.raises(UnicodeEncodeError):
        write_prompts(path, [PROMPTS[0], Prompt("b", "x", ("half \ud800",))])
    assert load_prompts(path) == PROMPTS
    assert [p.name for p in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "none" / "out.jsonl", tmp_path / "file" / "out.jsonl"):
        with pytest.raises(UserError, match="cannot be written"):
            write_prompts(path, PROMPTS)


def test_the_fingerprint_is_of_the_prompts_and_not_of_their_spelling(tmp_path: Path) -> None:
    one = load_prompts(_file(tmp_path, {"id": "a", "domain": "d", "turns": ["é"]}))
    other = load_prompts(_file(tmp_path, '{"turns":["é"],\t"id":"a", "domain":"d"}\n\n'))
    assert prompts_fingerprint(one) == prompts_fingerprint(other)
    different = [Prompt("a", "d", ("e",)), Prompt("b", "d", ("é",)), Prompt("a", "e", ("é",)), *PROMPTS]
    prints = {prompts_fingerprint([p]) for p in (*one, *different)}
    assert len(prints) == 1 + len(different)
    assert prompts_fingerprint(PROMPTS) != prompts_fingerprint(PROMPTS[::-1])


def _words(prompt: Prompt) -> list[str]:
    """Lower-case words; a Chinese character is one, for want of spaces."""
    return re.findall(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+", " ".join(prompt.turns).lower())


def _near_duplicates(prompts: list[Prompt]) -> list[tuple[str, str]]:
    """Pairs that share eight words in a row, or half of all their words."""
    words = [_words(p) for p in prompts]
    sets = [set(w) for w in words]
    runs = [{tuple(w[i : i + 8]) for i in range(len(w) - 7)} for w in words]
    return [
        (prompts[i].id, prompts[j].id)
        for i, j in combinations(range(len(prompts)), 2)
        if 2 * len(sets[i] & sets[j]) > len(sets[i] | sets[j]) or not runs[i].isdisjoint(runs[j])
    ]


def test_the_shipped_sets_are_large_and_balanced() -> None:
    train, gate = shipped_prompts("train"), shipped_prompts("gate")
    assert len(train) >= 640
    assert len(gate) >= 128
    in_train, in_gate = Counter(p.domain for p in train), Counter(p.domain for p in gate)
    assert set(in_train) == set(in_gate) == set(DOMAINS)
    for domain in DOMAINS:
        share = in_gate[domain] / (in_gate[domain] + in_train[domain])
        assert share == pytest.approx(len(gate) / len(gate + train), abs=0.015), domain
    for prompts in (train, gate):
        two_turns = sum(len(p.turns) == 2 for p in prompts) / len(prompts)
        chinese = sum(p.domain == "chinese" for p in prompts) / len(prompts)
        assert 0.05 < two_turns < 0.12
        assert 0.08 < chinese < 0.13
        # A budget that takes the first prompts only still meets every domain.
        assert {p.domain for p in prompts[:16]} == set(DOMAINS)


def test_no_shipped_prompt_is_nearly_another() -> None:
    prompts = shipped_prompts("train") + shipped_prompts("gate")
    assert len({p.id for p in prompts}) == len(prompts)
    assert _near_duplicates(prompts) == []
    # The measure does find a prompt that differs by a number.
    copy = replace(prompts[0], id="copy", turns=(re.sub(r"\d+", "77", prompts[0].turns[0]),))
    assert copy.turns != prompts[0].turns
    assert _near_duplicates([prompts[0], copy]) == [(prompts[0].id, "copy")]


def test_shipped_prompts_are_short_clean_and_named_after_their_domain() -> None:
    for prompt in shipped_prompts("train") + shipped_prompts("gate"):
        assert re.fullmatch(rf"shipped/{prompt.domain}/\d{{3}}", prompt.id)
        for turn in prompt.turns:
            assert turn == turn.strip()
            assert unicodedata.is_normalized("NFC", turn)
            assert turn.count("```") % 2 == 0
        assert len("".join(prompt.turns)) <= 1000
        assert bool(re.search(r"[\u4e00-\u9fff]", prompt.turns[0])) == (prompt.domain == "chinese")
