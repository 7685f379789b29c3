"""Sources of prompts: every kind of file gives the same prompts, and every mistake is named."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import MAX_LINE_BYTES
from dflash_core.prompts.source_spec import parse_source
from dflash_core.prompts.sources import open_sources
from dflash_core.types import Prompt

ROWS: list[dict[str, Any]] = [
    {"question": "What is é?", "subject": "letters", "level": 1},
    {"question": "你好吗", "subject": None, "level": 2},
    {"question": "three", "subject": "numbers", "level": 3},
]
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: short
  data_files:
  - split: train
    path: short/train-*
---
"""


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _arrow(path: Path, new: Any) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        for start in range(len(ROWS)):
            writer.write_table(table.slice(start, 1))


def _write(path: Path) -> None:
    match path.name:
        case "q.jsonl":
            path.write_bytes(_lines(ROWS))
        case "q.jsonl.gz" | "Q.JSONL.GZ":
            path.write_bytes(gzip.compress(_lines(ROWS)))
        case "q.json":
            path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
        case "q.parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
        case _:
            _arrow(path, pa.ipc.new_stream)


def _prompts(*texts: str) -> list[Prompt]:
    return [prompt for source in open_sources(texts) for prompt in source.prompts()]


def _refusal(*texts: str) -> str:
    with pytest.raises(UserError) as caught:
        _prompts(*texts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["q.jsonl", "q.jsonl.gz", "Q.JSONL.GZ", "q.json", "q.parquet", "q.arrow"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _write(path)
    found = _prompts(f"{path}?prompt=question&domain_column=subject")
    assert found == [
        Prompt(f"{name[0]}/1", "letters", ("What is é?",)),
        Prompt(f"{name[0]}/2", "default", ("你好吗",)),
        Prompt(f"{name[0]}/3", "numbers", ("three",)),
    ]


def test_an_arrow_file_that_is_no_stream_is_read_too(tmp_path: Path) -> None:
    _arrow(tmp_path / "f.arrow", pa.ipc.new_file)
    assert len(_prompts(f"{tmp_path / 'f.arrow'}?prompt=question")) == 3


def test_a_folder_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.jsonl").write_bytes(_lines([{"prompt": "two"}]))
    pq.write_table(pa.Table.from_pylist([{"prompt": "one"}]), tmp_path / "1.parquet")
    (tmp_path / ".hidden.jsonl").write_text("{")
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "readme.md").write_text("x")
    assert [p.turns for p in _prompts(str(tmp_path))] == [("one",), ("two",)]
    (tmp_path / "empty").mkdir()
    assert "no file of prompts" in _refusal(str(tmp_path / "empty"))


def test_what_datasets_saves_to_disk_is_a_folder_of_prompts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    found = _prompts(f"{tmp_path / 'saved'}?prompt=question&domain=x")
    assert [p.turns[0] for p in found] == [row["question"] for row in ROWS]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset's folder as the Hub has them: a card, two configurations, splits."""
    folder = tmp_path / "dataset"
    for name, rows in (("main/train-0", ROWS), ("main/test-0", ROWS[:2]), ("short/train-0", ROWS[2:])):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    (folder / "README.md").write_text(CARD)
    return folder


def test_a_datasets_configuration_and_split_are_what_datasets_makes_of_them(dataset: Path) -> None:
    def asked(query: str) -> list[str]:
        return [p.turns[0] for p in _prompts(f"{dataset}?prompt=question&{query}")]

    assert asked("config=main&split=train") == [row["question"] for row in ROWS]
    assert asked("config=main&split=test") == [row["question"] for row in ROWS[:2]]
    assert asked("config=short") == ["three"]
    assert "Available: ['main', 'short']" in _refusal(f"{dataset}?config=none")
    assert "Available splits" in _refusal(f"{dataset}?config=main&split=none")


def test_a_hub_id_without_the_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    sentence = _refusal("nobody/nothing?split=train")
    assert "nobody/nothing" in sentence and sentence.endswith("pass its folder")
    assert "there is no prompt file ./x/y" in _refusal("./x/y")
    assert "there is no prompt file none.jsonl" in _refusal("none.jsonl")


def test_the_spelling_of_a_source(tmp_path: Path) -> None:
    spec = parse_source("org/name@v1?config=c&split=s&weight=0.5&turns=all&skip_bad=1&id=")
    assert (spec.location, spec.revision, spec.config, spec.split) == ("org/name", "v1", "c", "s")
    assert (spec.weight, spec.all_turns, spec.skip_bad, spec.id) == (0.5, True, True, "")
    odd = tmp_path / "a?weight=2.jsonl"
    odd.write_bytes(_lines([{"prompt": "x"}]))
    assert parse_source(str(odd)).location == str(odd)
    assert len(_prompts(str(odd))) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.jsonl?wieght=2", "did you mean weight"),
        ("a.jsonl?zzz=2", "use weight, domain"),
        ("a.jsonl?weight=0", "above 0"),
        ("a.jsonl?weight=much", "above 0"),
        ("a.jsonl?weight=nan", "above 0"),
        ("a.jsonl?skip_bad=yes", "skip_bad=0 or skip_bad=1"),
        ("?weight=2", "names no prompts"),
        ("a.jsonl?weight=1e-320", "from 1e-06 to 1,000,000"),
        ("a.jsonl?weight=1e308", "from 1e-06 to 1,000,000"),
        ("a.jsonl?weight=1&weight=2", "gives weight= 2 times"),
        (f"a.jsonl?domain={'x' * 5000}", "there is no prompt file a.jsonl"),
        ("~nouser-of-this-name/x.jsonl", "there is no prompt file ~nouser-of-this-name/x.jsonl"),
        ("\udcff.jsonl", "rename the file"),
    ],
)
def test_a_query_that_cannot_be_meant(text: str, said: str) -> None:
    assert said in _refusal(text)


def test_a_file_has_no_split(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(_lines([{"prompt": "x"}]))
    assert "neither config nor split" in _refusal(f"{tmp_path / 'a.jsonl'}?split=train")
    (tmp_path / "a.csv").write_text("x")
    assert "of no kind known here" in _refusal(str(tmp_path / "a.csv"))


def test_a_row_that_is_no_prompt_is_an_error_or_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "one"}, {"messages": [{"role": "assistant", "content": "x"}]}, {"prompt": "three"}]
    table = pa.Table.from_pylist([{"messages": None, **row} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for name in ("a.parquet", "a.json"):
        assert f"{name} row 2" in _refusal(str(tmp_path / name))
        (source,) = open_sources([f"{tmp_path / name}?skip_bad=1"])
        bad: list[UserError] = []
        assert [p.id for p in source.prompts(bad.append)] == ["a/1", "a/3"]
        assert len(bad) == 1 and "row 2" in str(bad[0])


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(_lines(ROWS))
    sentence = _refusal(f"{tmp_path / 'a.jsonl'}?prompt=questions")
    assert 'no column "questions" but "question", "subject", "level"' in sentence


@pytest.mark.parametrize("key", ["id", "domain_column", "tools"])
def test_a_column_that_no_row_has_is_refused_and_one_that_some_have_is_not(tmp_path: Path, key: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines([{"prompt": "x"}, {"prompt": "y"}]))
    sentence = _refusal(f"{path}?{key}=subjcet")
    assert f'no row with the column "subjcet", which ?{key}= names' in sentence and '"prompt"' in sentence
    path.write_bytes(_lines([{"prompt": "x"}, {"prompt": "y", "subjcet": [] if key == "tools" else "s"}]))
    assert len(_prompts(f"{path}?{key}=subjcet")) == 2
    assert len(_prompts(f"{path}?id=")) == 2


def test_keys_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines([{"prompt": "x"}]))
    assert "both ?prompt= and ?messages=" in _refusal(f"{path}?prompt=prompt&messages=m")
    for query in ("prompt=p", "tools=t", "turns=all"):
        with pytest.raises(UserError, match="are traces, which are read without"):
            open_sources([f"{path}?{query}"], traces=True)


def test_leaving_bad_rows_out_is_named_where_it_leaves_something(tmp_path: Path) -> None:
    path, bad, good = tmp_path / "a.jsonl", {"messages": []}, {"prompt": "x"}
    for rows, helps in (([good, bad], True), ([bad, good], True), ([bad, bad], False), ([bad], False)):
        path.write_bytes(_lines(rows))
        assert _refusal(str(path)).endswith(", or leave such rows out with ?skip_bad=1") == helps
    path.write_bytes(_lines([bad]) + b"{")
    assert "line 1: no message" in _refusal(str(path)) and "skip_bad" not in _refusal(str(path))


def test_what_is_not_there_or_empty_is_called_what_it_would_be(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    assert "give it rows with" in _refusal(str(tmp_path / "empty.parquet"))
    assert _refusal("a.jsonl,b.jsonl").endswith("repeat the flag for several sources")
    with pytest.raises(UserError, match=r"there is no trace file none.jsonl; check the path$"):
        open_sources(["none.jsonl"], traces=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"prompt": "x"}, {"prompt": ', "row 2 is not JSON"),
        ('[{"prompt": "x"}, {"prompt": "y"', "row 2 is not JSON"),
        ('[{"prompt": "x"}, 3]', "row 2 is a JSON number"),
        ("[]", "holds no prompts"),
        ('[{"prompt": "x"}]garbage', r"goes on after its list's end (row 1)"),
        ('[{"prompt": "x"}] [{"prompt": "y"}]', r"goes on after its list's end (row 1)"),
        ("[] {}", r"goes on after its list's end (row 0)"),
        ('[{"prompt": "x"} {"prompt": "y"}]', "neither a comma nor the list's end after row 1"),
        ('[{"prompt": "x"}', "neither a comma nor the list's end after row 1"),
        ('[{"prompt": "x"},, {"prompt": "y"}]', "row 2 is not JSON"),
        ('[{"prompt": "x"},]', "row 2 is not JSON"),
        ("", "holds no prompts"),
        ("nonsense", "line 1 is not JSON"),
        ('[{"prompt": "\\ud800"}]', "surrogate"),
        ('[{"prompt": "' + "x" * MAX_LINE_BYTES + '"', "longer than 4 MiB"),
    ],
)
def test_a_json_file_that_is_no_list_of_prompts(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert said in _refusal(str(tmp_path / "a.json"))


def test_a_long_json_list_is_read_piece_by_piece(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} " + "x]}{[," * 50} for i in range(20_000)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (source,) = open_sources([str(tmp_path / "a.json")])
    assert [p.turns[0] for p in source.prompts()] == [row["prompt"] for row in rows]


def test_a_json_file_of_lines_is_read_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(_lines(ROWS))
    assert len(_prompts(f"{tmp_path / 'a.json'}?prompt=question")) == 3


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(_lines(ROWS))[:-12])
    assert "no whole gzip file" in _refusal(f"{tmp_path / 'a.jsonl.gz'}?prompt=question")
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"PAR1 nothing of the kind")
        assert f"{name} cannot be read after row 0" in _refusal(str(tmp_path / name))


def test_ids_of_several_sources_do_not_meet(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(_lines([{"id": "1", "prompt": folder}, {"prompt": "z"}]))
    (tmp_path / "b.jsonl").write_bytes(_lines([{"id": "b/1", "prompt": "w"}]))
    texts = [str(tmp_path / name) for name in ("x/a.jsonl", "y/a.jsonl", "b.jsonl")]
    assert [p.id for p in _prompts(*texts)] == ["a-1/1", "a-1/a/2", "a-2/1", "a-2/a/2", "b/1"]
    assert "named twice" in _refusal(texts[0], texts[0])
    assert open_sources([]) == ()


def test_a_made_up_prefix_is_no_other_sources_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("x/train.jsonl", "y/train.jsonl", "train-1.jsonl")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(_lines([{"id": "1", "prompt": name}]))
    texts = [str(tmp_path / name) for name in names]
    assert [p.id for p in _prompts(*texts)] == ["train-2/1", "train-3/1", "train-1/1"]
    monkeypatch.chdir(tmp_path / "x")
    assert [p.id for p in _prompts(".", texts[2])] == ["x/1", "train-1/1"]


def test_a_file_that_joins_a_datasets_folder_is_noticed(dataset: Path) -> None:
    (source,) = open_sources([f"{dataset}?config=main&prompt=question"])
    source.check_unchanged()
    pq.write_table(pa.Table.from_pylist(ROWS), dataset / "main" / "train-1.parquet")
    with pytest.raises(UserError, match="other files than when it was opened"):
        source.check_unchanged()


def test_a_source_is_known_by_its_content_and_not_by_its_place(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    big = [{"prompt": f"{i} " + "x" * 1000} for i in range(1500)]
    (tmp_path / "a.jsonl").write_bytes(_lines(big))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jsonl").write_bytes(_lines(big))
    one, other = (open_sources([str(p)], cache)[0] for p in sorted(tmp_path.rglob("a.jsonl")))
    assert one.identity == other.identity
    assert open_sources([f"{tmp_path / 'a.jsonl'}?domain=x"], cache)[0].identity != one.identity
    assert len(list(cache.iterdir())) == 2
    # A file that changed is read again, and one that did not is not: its cached digest is believed.
    before = (tmp_path / "a.jsonl").stat()
    (tmp_path / "a.jsonl").write_bytes(_lines([*big[:-1], {"prompt": "y" * 1005}]))
    os.utime(tmp_path / "a.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert open_sources([str(tmp_path / "a.jsonl")], cache)[0].identity != one.identity


DEEP = "[" * 100_000 + "]" * 100_000
ASKED = {"role": "user", "content": "x"}


def _calling(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "content": "1"}
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}


def _sharegpt_call(value: str) -> dict[str, Any]:
    asked = {"from": "human", "value": "x"}
    return {"conversations": [asked, {"from": "function_call", "value": value}, asked]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (_sharegpt_call("3"), "no JSON object"),
        (_sharegpt_call('["f"]'), "no JSON object"),
        (_sharegpt_call(DEEP), "RecursionError"),
        ({"prompt": "x", "tools": DEEP}, "RecursionError"),
        (_calling(DEEP), "RecursionError"),
        ({"prompt": "x", "tools": '[{"name": "\\ud800"}]'}, "surrogate"),
        (_calling('{"x": "\\ud800"}'), "surrogate"),
    ],
)
def test_whatever_is_odd_in_a_row_is_its_error_and_can_be_left_out(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(_lines([{"prompt": "one"}, row]))
    sentence = _refusal(str(tmp_path / "a.jsonl"))
    assert "a.jsonl line 2" in sentence and said in sentence
    assert [p.id for p in _prompts(f"{tmp_path / 'a.jsonl'}?skip_bad=1")] == ["a/1"]


@pytest.mark.parametrize("content", [3, {"text": "x"}, [3], [{"type": "image"}]])
def test_a_logged_answer_that_is_no_text_is_its_rows_error(tmp_path: Path, content: Any) -> None:
    def row(content: Any) -> dict[str, Any]:
        choice = {"message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        return {"request": {"messages": [ASKED]}, "response": {"choices": [choice]}}

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (tmp_path / "a.jsonl").write_bytes(_lines([row(parts), row(None), row(content)]))
    with pytest.raises(UserError, match=r"a\.jsonl line 3: the response"):
        list(open_sources([str(tmp_path / "a.jsonl")], traces=True)[0].prompts())
    (source,) = open_sources([f"{tmp_path / 'a.jsonl'}?skip_bad=1"], traces=True)
    assert [getattr(trace, "answer", None) for trace in source.prompts()] == ["ab", ""]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_value_that_cannot_be_read_matters_where_it_is_needed(tmp_path: Path, name: str) -> None:
    no_text = pa.array([b"one", b"\xff", b"three"]).cast(pa.binary()).view(pa.string())
    fine = pa.array(["x", "y", "z"])
    late = pa.array([0, 2**62, 1], pa.timestamp("ms"))
    twice = pa.StructArray.from_arrays([fine, fine], names=["a", "a"])
    table = pa.table({"prompt": fine, "note": no_text, "at": late, "twice": twice})
    broken = pa.table({"prompt": no_text, "question": fine})
    for kept, prompts in ((table, ["x", "y", "z"]), (broken, ["one", "three"])):
        if name == "a.parquet":
            pq.write_table(kept, tmp_path / name)
        else:
            with pa.OSFile(str(tmp_path / name), "wb") as sink, pa.ipc.new_stream(sink, kept.schema) as w:
                w.write_table(kept)
        assert [p.turns[0] for p in _prompts(f"{tmp_path / name}?skip_bad=1")] == prompts
    assert f'{name} row 2: the column "prompt" cannot be read' in _refusal(str(tmp_path / name))
    assert len(_prompts(f"{tmp_path / name}?prompt=question")) == 3


def test_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")).write_bytes(_lines(ROWS))
    assert "\\udcff.jsonl' is not UTF-8; rename the file" in _refusal(str(tmp_path))
