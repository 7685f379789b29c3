"""Rows of other people's formats as prompts, and how they reach the chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_core.corpus.samples import check_tools, render, render_text
from dflash_core.errors import UserError
from dflash_core.prompts.prompt_files import load_prompts, prompts_fingerprint, write_prompts
from dflash_core.prompts.prompt_lengths import FittingPrompts
from dflash_core.prompts.prompt_rows import to_prompt
from dflash_core.prompts.source_spec import SourceSpec, parse_source
from dflash_core.prompts.thinking import check_thinking, with_thinking
from dflash_core.types import Message, Prompt, opening
from tests.dflash_core.chat_tokenizers import PLAIN, THINKING, chat_tokenizer, checkpoint_of

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"z": 1, "a": 2}}}
]
AGENT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+2?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "audio": None},
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
]


def _prompt(row: dict[str, Any], query: str = "") -> Prompt:
    spec = parse_source(f"nowhere.jsonl?{query}") if query else SourceSpec("nowhere.jsonl")
    return to_prompt(row, "here row 1", "nowhere/1", spec)


def test_a_conversation_that_ends_with_a_tools_result_is_answered_as_it_stands() -> None:
    prompt = _prompt({"messages": AGENT, "tools": TOOLS})
    assert prompt.turns == () and prompt.num_answers == 1
    assert [m.role for m in opening(prompt)] == ["system", "user", "assistant", "tool"]
    assert opening(prompt)[3] == Message("tool", "3", '{"tool_call_id":"c1"}')
    # An answer behind it is what is to be made anew.
    again = _prompt({"messages": [*AGENT, {"role": "assistant", "content": "3"}], "tools": json.dumps(TOOLS)})
    assert again == prompt


def test_tools_and_further_keys_reach_the_template_in_their_own_order() -> None:
    prompt = _prompt({"messages": AGENT, "tools": TOOLS})
    text = render_text(chat_tokenizer(THINKING), opening(prompt), tools=prompt.tools)
    expected = (
        f"<|start|>tools\n{json.dumps(TOOLS[0])}\n<|end|>\n<|start|>system\nbe brief<|end|>\n"
        '<|start|>user ann\n1+2?<|end|>\n<|start|>assistant\nCALL add {"b": 2, "a": 1}<|end|>\n'
        "<|start|>tool\n3<|end|>\n<|start|>assistant\n"
    )
    assert text == expected
    # What transformers itself makes of the same messages, arguments parsed as serving engines parse them.
    parsed = json.loads(json.dumps(AGENT))
    parsed[2]["tool_calls"][0]["function"]["arguments"] = {"b": 2, "a": 1}
    tokenizer = chat_tokenizer(THINKING)
    ids = tokenizer.apply_chat_template(parsed, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert render(tokenizer, opening(prompt), tools=prompt.tools) == list(ids)


def test_sharegpt_conversations() -> None:
    row = {
        "id": 3,
        "system": "be brief",
        "conversations": [
            {"from": "human", "value": "1+2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "three"},
            {"from": "human", "value": "and 4?"},
            {"from": "gpt", "value": "seven"},
        ],
    }
    prompt = _prompt(row)
    assert (prompt.id, prompt.turns) == ("3", ("and 4?",))
    assert [m.role for m in prompt.history] == ["system", "user", "assistant", "tool", "assistant"]
    call = json.loads(prompt.history[2].extra)
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def test_every_question_of_a_conversation_can_be_asked_anew() -> None:
    said = ["system", "s"], ["user", "1?"], ["assistant", "one"], ["user", "2?"], ["assistant", "two"]
    row = {"messages": [{"role": role, "content": content} for role, content in said]}
    assert _prompt(row, "turns=all") == Prompt(
        "nowhere/1", "default", ("1?", "2?"), (Message("system", "s"),)
    )
    assert _prompt(row).turns == ("2?",)
    # With a tool's results in between the questions depend on the answers.
    assert _prompt({"messages": AGENT}, "turns=all") == _prompt({"messages": AGENT})


def test_plain_prompts_and_columns_by_name() -> None:
    assert _prompt({"prompt": "x"}).turns == ("x",)
    assert _prompt({"prompt": [{"role": "user", "content": "x"}]}).turns == ("x",)
    row = {"q": "x", "topic": "math", "uid": 5, "fn": [], "chat": [{"from": "human", "value": "y"}]}
    found = _prompt(row, "prompt=q&domain_column=topic&id=uid&tools=fn")
    assert found == Prompt("5", "math", ("x",))
    assert _prompt(row, "messages=chat&domain=d") == Prompt("nowhere/1", "d", ("y",))
    assert _prompt({"id": "taken", "prompt": "x"}, "id=").id == "nowhere/1"
    # A column of that name holds what somebody else's model thought.
    assert _prompt({"prompt": "x", "thinking": "hm"}).thinking is None
    assert _prompt({"prompt": "x", "enable_thinking": False}).thinking is False
    assert _prompt({"prompt": "x", "chat_template_kwargs": {"enable_thinking": True}}).thinking is True


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"conversations": [{"from": "function_call", "value": "f()"}, {"from": "human", "value": "x"}]},
            "no JSON",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "no list of objects"),
        ({"turns": ["x"], "conversations": []}, "both"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": [{}]}]}, "not text"),
    ],
)
def test_what_cannot_be_used_is_said(row: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        _prompt(row)
    assert str(caught.value).startswith("here row 1")


def test_prompts_with_tools_and_thinking_are_read_back_equal(tmp_path: Path) -> None:
    agent = _prompt({"id": "a", "messages": AGENT, "tools": TOOLS})
    asked = replace(agent, id="b", turns=("and?", "so?"), thinking=False)
    write_prompts(tmp_path / "p.jsonl", [agent, asked])
    assert load_prompts(tmp_path / "p.jsonl") == [agent, asked]


def test_the_fingerprint_of_a_plain_prompt_knows_nothing_of_what_it_has_not() -> None:
    plain = Prompt("a", "d", ("x",), (Message("system", "s"),))
    # sha256 of the canonical JSON of id, domain, turns and history, as it was before there were tools.
    assert prompts_fingerprint([plain]) == "a06c12f6fb58a03cae201631a7b1e43d12a4c4a381e08ef33c34ce096238fa22"
    others = [replace(plain, tools="[]"), replace(plain, thinking=False), replace(plain, thinking=True)]
    others.append(replace(plain, history=(Message("system", "s", '{"name":"n"}'),)))
    assert len({prompts_fingerprint([p]) for p in (plain, *others)}) == 5


def test_thinking_on_and_off_are_domains() -> None:
    asked = [Prompt("a", "math", ("x",)), Prompt("b", "math", ("y",), thinking=False)]
    assert list(with_thinking(asked[:1], "default")) == asked[:1]
    both = list(with_thinking(asked, "both"))
    assert [(p.id, p.domain, p.thinking) for p in both] == [
        ("a/thinking", "math/thinking", True),
        ("a/no-thinking", "math/no-thinking", False),
        ("b", "math/no-thinking", False),
    ]
    assert [(p.id, p.domain) for p in with_thinking(asked[:1], "on")] == [("a", "math/thinking")]


def test_an_empty_think_block_stands_in_the_prompt() -> None:
    """So the span of what the target generates begins behind it."""
    tokenizer = chat_tokenizer(THINKING)
    off, on, unsaid = (
        render_text(tokenizer, [Message("user", "x")], thinking=thinking) for thinking in (False, True, None)
    )
    assert off == on + "<think>\n\n</think>\n\n"
    assert on == unsaid and on.endswith("<|start|>assistant\n")
    assert tokenizer.decode(render(tokenizer, [Message("user", "x")], thinking=False)) == off


def test_a_template_without_a_switch_refuses_to_be_switched() -> None:
    plain = checkpoint_of(chat_tokenizer(PLAIN))
    check_thinking(plain, "default")
    check_thinking(checkpoint_of(chat_tokenizer(THINKING)), "both")
    for thinking in ("on", "off", "both"):
        with pytest.raises(UserError, match="enable_thinking"):
            check_thinking(plain, thinking)  # type: ignore[arg-type]


def test_a_template_that_does_not_show_tools_refuses_them() -> None:
    asked = [_prompt({"prompt": "x"}), _prompt({"id": "a", "messages": AGENT, "tools": TOOLS})]
    check_tools(chat_tokenizer(THINKING), asked)
    check_tools(chat_tokenizer(PLAIN), asked[:1])
    with pytest.raises(UserError, match=r"prompt 'a' has tools, .*leave `tools` out .*--chat-template"):
        check_tools(chat_tokenizer(PLAIN), asked)
    for served in (False, True):
        fitting = FittingPrompts(chat_tokenizer(PLAIN), 8, 512, any_share=True, served=served)
        if served:
            assert len(list(fitting.of(asked, lambda _n: None))) == 2
            continue
        with pytest.raises(UserError, match="prompt 'a' has tools"):
            list(fitting.of(asked, lambda _n: None))


def test_a_template_that_fails_names_the_prompt() -> None:
    broken = chat_tokenizer("{{ raise_exception('no\\nsystem') }}")
    with pytest.raises(UserError, match=r"cannot render prompt 'a' with the roles user \(no system\); mend"):
        list(FittingPrompts(broken, 8, 512, any_share=True).of([Prompt("a", "d", ("x",))], lambda _n: None))


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_call_without_words_reaches_the_template_with_empty_text(content: dict[str, Any]) -> None:
    """As engines render it: never as None, and never without the key."""
    talk = [*AGENT[:2], {"role": "assistant", **content, "tool_calls": [CALL]}, AGENT[3]]
    strict = "{% for m in messages %}[{{ m.content is string }}{{ m.content }}]{% endfor %}"
    text = render_text(chat_tokenizer(strict), opening(_prompt({"messages": talk})))
    assert text == "[Truebe brief][True1+2?][True][True3]"
