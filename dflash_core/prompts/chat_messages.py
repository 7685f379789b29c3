"""Messages as others write them: OpenAI's chat format with tools, and ShareGPT's `from` and `value`."""

from __future__ import annotations

import json
from typing import Any

from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import kind, shown
from dflash_core.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot", "bing", "bard", "claude"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function_return"), "tool"),
    **dict.fromkeys(("system",), "system"),
}
_CALLS = ("function_call", "tool_call")
"""An assistant's message in ShareGPT that is a call: its value is the call as JSON."""


def parse_messages(value: Any, where: str) -> list[Message]:
    """Every message of a conversation. Raises UserError for one that cannot be used."""
    if not isinstance(value, list):
        raise UserError(f'{where}: "messages" is a JSON {kind(value)}; make it a list of role and content')
    return [_message(item, f"{where}: message {i}") for i, item in enumerate(value, start=1)]


def is_answer(message: dict[str, Any]) -> bool:
    """Whether a message, in either format, is the assistant's."""
    sender = message.get("from") if "role" not in message else message.get("role")
    return isinstance(sender, str) and (sender in _CALLS or _SHAREGPT.get(sender) == "assistant")


def parse_tools(value: Any, where: str) -> str:
    """The tools offered to the model, as `Prompt.tools` keeps them; a list, or a list's JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError:
            raise UserError(f'{where}: "tools" is text but no JSON; make it a list of tools') from None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f'{where}: "tools" is no list of objects; write them as the chat API does')
    return compact(value) if value else ""


def compact(value: Any) -> str:
    """JSON in one spelling; keys stay in their order, since templates show it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)


def text_of(value: Any, where: str) -> str:
    """`value` if it is text with something in it. Raises UserError."""
    if not isinstance(value, str):
        raise UserError(f"{where} is a JSON {kind(value)} where text is needed; write it as one string")
    if not value.strip():
        raise UserError(f"{where} is blank; write something into it or remove it")
    return value


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f'{where} is a JSON {kind(message)}; make it {{"role": "user", "content": "..."}}')
    if "from" in message and "role" not in message:
        return _sharegpt(message, where)
    role = _role(message.get("role"), where)
    extra = {k: v for k, v in message.items() if k not in ("role", "content") and v is not None}
    if isinstance(extra.get("tool_calls"), list):
        extra["tool_calls"] = [_with_arguments(call) for call in extra["tool_calls"]]
        if not extra["tool_calls"]:
            del extra["tool_calls"]
    if message.get("content") is None and extra.get("tool_calls"):
        return Message(role, "", compact({"content": None, **extra}))
    may_be_blank = role == "tool" or bool(extra.get("tool_calls") or extra.get("reasoning_content"))
    return Message(
        role, content_text(message.get("content"), where, may_be_blank), compact(extra) if extra else ""
    )


def _with_arguments(call: Any) -> Any:
    """A call with its arguments as an object: APIs send them as text, engines parse it before rendering."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _sharegpt(message: dict[str, Any], where: str) -> Message:
    sender, value = message.get("from"), message.get("value")
    if sender in _CALLS:
        try:
            call = json.loads(text_of(value, where))
        except ValueError:
            raise UserError(f"{where} is a {sender} but no JSON; write name and arguments") from None
        calls = call if isinstance(call, list) else [call]
        if not all(isinstance(c, dict) for c in calls):
            raise UserError(f"{where} is a {sender} but no JSON object; write name and arguments")
        wrapped = [c if "function" in c else {"type": "function", "function": c} for c in calls]
        extra = {"content": None, "tool_calls": [_with_arguments(c) for c in wrapped]}
        return Message("assistant", "", compact(extra))
    role = _SHAREGPT.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise UserError(
            f"{where} is from {shown(str(sender))}; use one of {', '.join([*_SHAREGPT, *_CALLS])}"
        )
    return Message(role, content_text(value, where, role == "tool"))


def _role(role: Any, where: str) -> str:
    if isinstance(role, str) and role in ROLES:
        return role
    said = f"the role {shown(role)}" if isinstance(role, str) else "no role in words"
    raise UserError(f"{where} has {said}; use one of {', '.join(ROLES)}")


def content_text(content: Any, where: str, may_be_blank: bool) -> str:
    """A message's text, or its text parts one after the other. Raises UserError for anything else."""
    if isinstance(content, list):
        texts = [
            part["text"]
            for part in content
            if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(content):
            raise UserError(
                f'{where} has a content part that is not {{"type": "text", "text": "..."}}; '
                "leave out what is not text"
            )
        content = "".join(texts)
    if may_be_blank and (content is None or (isinstance(content, str) and not content.strip())):
        return content or ""
    return text_of(content, where)
