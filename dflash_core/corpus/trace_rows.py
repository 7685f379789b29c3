"""What serving engines log of a request and its response, as traces; and traces as rows of our own.

Known are a chat completion's `request` and `response`, `messages` that end with the assistant's, and token
ids: `prompt_token_ids` with `token_ids` (or `response_token_ids`, `output_token_ids`), which need no text.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from dflash_core.errors import UserError
from dflash_core.prompts.chat_messages import content_text, parse_messages, parse_tools
from dflash_core.prompts.json_lines import kind, shown
from dflash_core.prompts.prompt_files import prompt_row
from dflash_core.prompts.prompt_rows import DEFAULT_DOMAIN, enable_thinking, label, to_be_answered
from dflash_core.prompts.source_spec import SourceSpec
from dflash_core.types import Message, Prompt, Trace

FORMAT = '"request" and "response", "messages" that end with an answer, or "prompt_token_ids" and "token_ids"'
_ANSWER_IDS = ("token_ids", "response_token_ids", "output_token_ids")
_STOPS = (None, "stop", "eos_token", "tool_calls")
"""Reasons for an answer's end that leave a stop token behind it; others: length, abort, a filter."""


def to_traces(row: dict[str, Any], where: str, default_id: str, spec: SourceSpec) -> list[Trace]:
    """The exchanges that a row holds: one, or each answer of a conversation. Raises UserError if none."""
    prompt_id = (label(row, spec.id, where) if spec.id else None) or default_id
    domain = spec.domain or label(row, spec.domain_column, where) or DEFAULT_DOMAIN
    base = Trace(prompt_id, domain, ())
    request, response = _body(row.get("request")), _body(row.get("response"))
    for key, value in (("request", request), ("response", response)):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            raise UserError(
                f'{where}: "{key}" is an object\'s JSON as text; log it as an object, not as text'
            )
    if isinstance(request, dict) and isinstance(response, dict):
        return [_exchange({**row, **request}, response, base, where)]
    if isinstance(row.get("prompt_token_ids"), list):
        return [_ids_only(row, base, where)]
    if isinstance(row.get(spec.messages or "messages"), list):
        return _conversation(row, row[spec.messages or "messages"], base, where)
    keys = ", ".join(map(shown, list(row)[:8])) or "no keys at all"
    raise UserError(f"{where} is no trace, it has {keys}; give it {FORMAT}")


def trace_row(trace: Trace) -> dict[str, Any]:
    """A trace as a JSON object that `read_trace_row` takes for an equal one."""
    logged = {
        "answer": trace.answer,
        "answer_ids": list(trace.answer_ids),
        "prompt_ids": list(trace.prompt_ids),
        "stopped": trace.stopped,
        "template": trace.template,
        "unusable": trace.unusable,
    }
    return {**prompt_row(trace), "logged": logged}


def read_trace_row(text: str) -> Trace:
    """What `trace_row` wrote."""
    row = json.loads(text)
    logged: dict[str, Any] = row["logged"]
    for key in ("answer_ids", "prompt_ids"):
        logged[key] = tuple(logged[key])
    history = parse_messages(row.get("history", []), row["id"])
    return Trace(
        id=row["id"],
        domain=row["domain"],
        turns=tuple(row["turns"]),
        history=tuple(history),
        tools=parse_tools(row.get("tools", []), row["id"]),
        thinking=row.get("thinking"),
        **logged,
    )


def without_answer(trace: Trace) -> Prompt:
    """What was asked, to be asked again."""
    return Prompt(trace.id, trace.domain, trace.turns, trace.history, trace.tools, trace.thinking)


def _exchange(request: dict[str, Any], response: dict[str, Any], base: Trace, where: str) -> Trace:
    asked = _asked(request, base, where)
    choices = response.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise UserError(f"{where}: the response has no choice with a message; log chat completions whole")
    ids = _ids(choice.get("token_ids"), where)
    prompt_ids = response.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return replace(
        asked,
        answer=content_text(message.get("content"), f"{where}: the response", may_be_blank=True),
        answer_ids=ids,
        prompt_ids=_ids(prompt_ids, where),
        stopped=_stopped(choice),
        unusable="" if ids else _unusable(message),
    )


def _ids_only(row: dict[str, Any], base: Trace, where: str) -> Trace:
    key = next((key for key in _ANSWER_IDS if isinstance(row.get(key), list)), None)
    if key is None:
        raise UserError(f"{where} has prompt_token_ids but no answer's; give it {FORMAT}")
    asked = base
    if isinstance(row.get("messages"), list):
        messages = parse_messages(row["messages"], where)
        turns, history = to_be_answered(messages, where)
        asked = _with(base, row, turns, history, where)
    return replace(
        asked,
        answer_ids=_ids(row[key], where),
        prompt_ids=_ids(row["prompt_token_ids"], where),
        stopped=_stopped(row),
        template=_template(row, where),
    )


def _conversation(row: dict[str, Any], value: Any, base: Trace, where: str) -> list[Trace]:
    """Every answer of a conversation, each with what had been said before it."""
    messages = parse_messages(value, where)
    if not messages or messages[-1].role != "assistant":
        raise UserError(f"{where}: the messages do not end with the assistant's; log the answer too")
    found: list[Trace] = []
    for end, message in enumerate(messages):
        if message.role != "assistant":
            continue
        turns, history = to_be_answered(messages[:end], where)
        asked = _with(base, row, turns, history, where)
        last = end == len(messages) - 1
        found.append(
            replace(
                asked,
                id=base.id if not found else f"{base.id}#{len(found) + 1}",
                answer=message.content,
                stopped=not last or _stopped(row),
                unusable=_unusable(json.loads(message.extra or "{}")),
            )
        )
    return found


def _asked(request: dict[str, Any], base: Trace, where: str) -> Trace:
    messages = parse_messages(request.get("messages"), where)
    if messages and messages[-1].role == "assistant":
        raise UserError(f"{where}: the request ends with the assistant's message; leave it out of the traces")
    turns, history = to_be_answered(messages, where)
    return _with(base, request, turns, history, where)


def _with(
    base: Trace, row: dict[str, Any], turns: tuple[str, ...], history: list[Message], where: str
) -> Trace:
    tools = parse_tools(row["tools"], where) if row.get("tools") is not None else ""
    return replace(
        base,
        turns=turns,
        history=tuple(history),
        tools=tools,
        thinking=enable_thinking(row),
        template=_template(row, where),
    )


def _body(value: Any) -> Any:
    """A request or response, taken out of the envelope that batch files put it in."""
    return value["body"] if isinstance(value, dict) and isinstance(value.get("body"), dict) else value


def _stopped(choice: dict[str, Any]) -> bool:
    # An engine that was told to stop at a string names it, and leaves no stop token.
    return choice.get("finish_reason") in _STOPS and not isinstance(choice.get("stop_reason"), str)


def _unusable(message: dict[str, Any]) -> str:
    """What an engine took out of the text, so that its tokens cannot be told from what is left."""
    if message.get("tool_calls"):
        return "tool calls without token ids"
    if message.get("reasoning_content") or message.get("reasoning"):
        return "reasoning apart from the answer, without token ids"
    return ""


def _ids(value: Any, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise UserError(f"{where}: token ids are a JSON {kind(value)} with other things in it; log plain ids")
    return tuple(value)


def _template(row: dict[str, Any], where: str) -> str:
    value = row.get("chat_template_sha256") or ""
    if not isinstance(value, str):
        raise UserError(f"{where}: chat_template_sha256 is a JSON {kind(value)}; make it 64 hex digits")
    return value
