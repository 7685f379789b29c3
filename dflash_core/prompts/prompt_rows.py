"""A row of anybody's data as a Prompt: turns, a plain prompt, OpenAI messages, ShareGPT conversations."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from dflash_core.errors import UserError
from dflash_core.prompts.chat_messages import is_answer, parse_messages, parse_tools, text_of
from dflash_core.prompts.json_lines import Unreadable, kind, shown
from dflash_core.prompts.source_spec import SourceSpec
from dflash_core.types import Message, Prompt

DEFAULT_DOMAIN = "default"
FORMAT = '"turns": ["user message", ...] or "messages": [{"role": "user", "content": "..."}]'
_LABELS = ("id", "domain", "system", "source")
"""Columns of text that nobody asks."""
_CONVERSATIONS = ("messages", "conversations", "conversation")
_ASKED = {*_CONVERSATIONS, "turns", "history", "prompt"}
"""Columns that are looked at where the query names neither prompt nor messages."""
_READ: set[str | None] = {
    *("system", "thinking", "enable_thinking", "chat_template_kwargs"),
    *("request", "response", "prompt_token_ids", "token_ids", "response_token_ids", "output_token_ids"),
    *("finish_reason", "stop_reason", "chat_template_sha256"),
}
"""Columns that are looked at whatever the query says."""
_ALIASES = {
    **dict.fromkeys(("question", "instruction", "query", "input", "text", "problem"), "prompt"),
    **dict.fromkeys(("message", "dialog", "chat"), "messages"),
}
"""What other formats call the same thing."""


def to_prompt(row: dict[str, Any], where: str, default_id: str, spec: SourceSpec) -> Prompt:
    """The prompt that a row holds; `spec` says which columns to look at. Raises UserError if it is none.

    Of a conversation, what stands after the last message that is not the assistant's is dropped; that
    message is the turn to be answered, and what comes before it the history.
    """
    prompt_id = (label(row, spec.id, where) if spec.id else None) or default_id
    domain = spec.domain or label(row, spec.domain_column, where) or DEFAULT_DOMAIN
    turns, history = _conversation(row, where, spec)
    tools = parse_tools(row[spec.tools], where) if row.get(spec.tools) is not None else ""
    return Prompt(prompt_id, domain, turns, tuple(history), tools, enable_thinking(row))


def check_readable(row: dict[str, Any], where: str, spec: SourceSpec) -> None:
    """Raise UserError if a column that may be looked at could not be read; others do not matter."""
    read = _READ | {spec.prompt, spec.messages, spec.tools, spec.id, spec.domain_column}
    if spec.traces or not (spec.prompt or spec.messages):
        read |= _ASKED
    for key, value in row.items():
        if isinstance(value, Unreadable) and key in read:
            raise UserError(f"{where}: the column {shown(key)} cannot be read ({value.why}); mend that row")


def check_encodable(prompt: Prompt, where: str) -> None:
    """Raise UserError if a text in it holds half a surrogate pair, as JSON within JSON can escape it."""
    texts = [prompt.id, prompt.domain, *prompt.turns, prompt.tools]
    texts += [text for message in prompt.history for text in (message.content, message.extra)]
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} escapes half a surrogate pair; replace that character") from None


def label(row: dict[str, Any], key: str, where: str) -> str | None:
    """A short text or a number under `key`. Raises UserError for anything else."""
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    what = "blank" if isinstance(value, str) else f"a JSON {kind(value)}"
    raise UserError(f'{where}: "{key}" is {what}; make it a short text or leave it out')


def to_be_answered(messages: Sequence[Message], where: str) -> tuple[tuple[str, ...], list[Message]]:
    """(turns, history) of a conversation, its last answers dropped. Raises UserError without a question."""
    if not any(message.role == "user" for message in messages):
        raise UserError(f'{where}: no message has the role "user"; add the one to be answered')
    asked = list(messages)
    while asked[-1].role not in ("user", "tool"):
        asked.pop()
    if asked[-1].role == "tool" or asked[-1].extra:
        return (), asked
    return (asked[-1].content,), asked[:-1]


def _conversation(row: dict[str, Any], where: str, spec: SourceSpec) -> tuple[tuple[str, ...], list[Message]]:
    if spec.prompt is not None:
        return _plain(_column(row, spec.prompt, where), where, spec)
    if spec.messages is not None:
        return _messages(_column(row, spec.messages, where), row, where, spec)
    key = next((key for key in _CONVERSATIONS if row.get(key) is not None), None)
    if "turns" in row and key is not None:
        raise UserError(f'{where} has both "turns" and "{key}"; keep one of them')
    if "turns" in row:
        history = parse_messages(row["history"], where) if row.get("history") else []
        # A prompt written by this package may be answered after a tool's result, without a turn.
        if not row["turns"] and history and history[-1].role in ("user", "tool"):
            return (), history
        return _turns(row["turns"], where), history
    if key is not None:
        return _messages(row[key], row, where, spec)
    if "prompt" in row:
        return _plain(row["prompt"], where, spec)
    raise UserError(_nothing_to_answer(row, where))


def _column(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        have = ", ".join(map(shown, list(row)[:8])) or "no column at all"
        raise UserError(f"{where} has no column {shown(name)} but {have}; name one of them after the ?")
    return row[name]


def _plain(value: Any, where: str, spec: SourceSpec) -> tuple[tuple[str, ...], list[Message]]:
    if isinstance(value, list):
        return _messages(value, {}, where, spec)
    return (text_of(value, f"{where}: the prompt"),), []


def _messages(
    value: Any, row: dict[str, Any], where: str, spec: SourceSpec
) -> tuple[tuple[str, ...], list[Message]]:
    messages = parse_messages(_without_last_answers(value), where)
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    turns, history = to_be_answered(messages, where)
    if not spec.all_turns or any(m.role == "tool" or m.extra for m in messages):
        return turns, history
    start = next(i for i, message in enumerate(messages) if message.role == "user")
    return tuple(m.content for m in messages if m.role == "user"), messages[:start]


def _without_last_answers(value: Any) -> Any:
    """Nobody asks for them again, so they need not be of any form."""
    if not isinstance(value, list):
        return value
    kept = list(value)
    while kept and isinstance(kept[-1], dict) and is_answer(kept[-1]):
        kept.pop()
    return kept


def _turns(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UserError(
            f'{where}: "turns" is a JSON {kind(value)}; make it a list of texts: "turns": ["user message"]'
        )
    if not value:
        raise UserError(f'{where}: "turns" is empty; put at least one user message into it')
    return tuple(text_of(turn, f"{where}: turn {i}") for i, turn in enumerate(value, start=1))


def enable_thinking(row: dict[str, Any]) -> bool | None:
    """What the row says of thinking: itself, or in what a request told the chat template."""
    told = row.get("chat_template_kwargs")
    told = told if isinstance(told, dict) else {}
    for value in (row.get("thinking"), row.get("enable_thinking"), told.get("enable_thinking")):
        if isinstance(value, bool):
            return value
    return None  # elsewhere "thinking" is a text: what somebody else's model thought


def _mapping(meant: str, key: str) -> str:
    return "" if meant == "turns" else f" Then write ?{meant}={key} after the source's name"


def _nothing_to_answer(row: dict[str, Any], where: str) -> str:
    keys = ", ".join(map(shown, list(row)[:8])) + (", ..." if len(row) > 8 else "")
    message = f'{where} has neither "turns" nor "messages" nor "prompt" but {keys or "no keys at all"}'
    for key in row:
        close = get_close_matches(key.lower(), ("turns", "messages", "prompt"), n=1, cutoff=0.75)
        meant = _ALIASES.get(key.lower()) or next(iter(close), None)
        if meant:
            message += f' (did you mean "{meant}" by {shown(key)}?{_mapping(meant, key)})'
            return f"{message}; give it {FORMAT}"
    text = next((k for k, v in row.items() if k not in _LABELS and isinstance(v, str) and v.strip()), None)
    if text is not None:
        message += f"; if {shown(text)} is the question, write ?prompt={text} after the source's name"
        return f"{message}, or give it {FORMAT}"
    return f"{message}; give it {FORMAT}"
