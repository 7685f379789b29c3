"""Prompts in and out: JSON lines read strictly, a user's mistakes named by file and line; the shipped set.

A line is `{"id", "domain", "turns": [user message, ...]}`, or `{"id", "domain", "messages": [{"role",
"content"}, ...]}` as chat APIs write it. `id` and `domain` may be left out. No torch here.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from dflash_core.errors import UserError
from dflash_core.fingerprint import fingerprint
from dflash_core.types import Message, Prompt

MAX_LINE_BYTES = 4 << 20
"""A longer line is no prompt: longer than any context, and a binary file has no line ends at all."""
DEFAULT_DOMAIN = "default"
ROLES = ("system", "user", "assistant")
_FORMAT = '"turns": ["user message", ...] or "messages": [{"role": "user", "content": "..."}]'
_ALIASES = {
    **dict.fromkeys(("turn", "prompt", "question", "instruction", "query", "input", "text"), "turns"),
    **dict.fromkeys(("message", "conversation", "conversations", "dialog", "chat"), "messages"),
}
"""What other formats call the same thing."""


def load_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a JSON lines file, in the file's order; blank lines are skipped.

    Of `messages`, those before the last user message become the history, that one the only turn;
    what follows it is an answer, and dropped. Raises UserError if the file cannot be read, holds no
    prompt, or has a line that is no prompt or repeats an id.
    """
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in _numbered_lines(path):
        where = f"{path} line {number}"
        prompt = _to_prompt(_parse(line, where), where, default_id=f"{path.stem}/{number}")
        if prompt.id in line_of:
            raise UserError(
                f"{path} gives the id {_shown(prompt.id)} on line {line_of[prompt.id]} and on line {number}; "
                "rename one of them"
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} holds no prompts; give it one JSON object a line with {_FORMAT}")
    return prompts


def shipped_prompts(split: Literal["train", "gate"]) -> list[Prompt]:
    """The prompts that come with this package; no prompt of one split is in the other."""
    resource = resources.files("dflash_core").joinpath("data", "prompts", f"{split}.jsonl")
    with resources.as_file(resource) as path:
        return load_prompts(path)


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """sha256 over the prompts in their order: ids and domains count too, the file and its format don't."""
    return fingerprint(list(prompts))


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write prompts so that `load_prompts` gives equal ones; `path` is the old file or all of the new.

    Raises UserError if the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as stream:
            for prompt in prompts:
                stream.write(json.dumps(_to_row(prompt), ensure_ascii=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); free some space or choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _to_row(prompt: Prompt) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt.id, "domain": prompt.domain}
    if not prompt.history:
        return {**row, "turns": list(prompt.turns)}
    # `messages` has one open turn: a later one would need the answer to the first in between.
    assert len(prompt.turns) == 1, f"{prompt.id} has a history and {len(prompt.turns)} turns"
    return {**row, "messages": [asdict(m) for m in (*prompt.history, Message("user", prompt.turns[0]))]}


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1, one in memory at a time."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                text = _decode(line, path, number)
                if text.strip():
                    yield number, text
    except FileNotFoundError:
        raise UserError(f"there is no prompt file {path}; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a directory; name a JSON lines file in it") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its rights") from None


def _decode(line: bytes, path: Path, number: int) -> str:
    if len(line) > MAX_LINE_BYTES:
        raise UserError(
            f"{path} line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; "
            "put each prompt on a line of its own"
        )
    try:
        # Editors on Windows put a byte order mark before the first line.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text (see line {number}); save it as UTF-8") from None


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where} is not JSON ({error.msg} at column {error.colno}); "
            "put one whole JSON object on each line"
        ) from None
    except UnicodeEncodeError:
        # JSON can escape half a character, which no tokenizer takes.
        raise UserError(f"{where} escapes half a surrogate pair; replace that character") from None
    except (RecursionError, ValueError):
        raise UserError(f"{where} nests too deeply or has an endless number; give it {_FORMAT}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where} is a JSON {_kind(row)} where an object is needed; give it {_FORMAT}")
    return row


def _to_prompt(row: dict[str, Any], where: str, default_id: str) -> Prompt:
    prompt_id, domain = _label(row, "id", where) or default_id, _label(row, "domain", where) or DEFAULT_DOMAIN
    if "turns" in row and "messages" in row:
        raise UserError(f'{where} has both "turns" and "messages"; keep one of them')
    if "turns" in row:
        return Prompt(prompt_id, domain, _turns(row["turns"], where))
    if "messages" in row:
        *history, last = _messages(row["messages"], where)
        return Prompt(prompt_id, domain, (last.content,), tuple(history))
    raise UserError(_nothing_to_answer(row, where))


def _label(row: dict[str, Any], key: str, where: str) -> str | None:
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and value.strip()):
        return value
    what = "blank" if isinstance(value, str) else f"a JSON {_kind(value)}"
    raise UserError(f'{where}: "{key}" is {what}; make it a short text or leave it out')


def _turns(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UserError(
            f'{where}: "turns" is a JSON {_kind(value)}; make it a list of texts: "turns": ["user message"]'
        )
    if not value:
        raise UserError(f'{where}: "turns" is empty; put at least one user message into it')
    return tuple(_text(turn, f"{where}: turn {i}") for i, turn in enumerate(value, start=1))


def _messages(value: Any, where: str) -> list[Message]:
    """The messages up to the last user message, that one included."""
    if not isinstance(value, list):
        raise UserError(f'{where}: "messages" is a JSON {_kind(value)}; make it a list of role and content')
    roles = [_role(message, f"{where}: message {i}") for i, message in enumerate(value, start=1)]
    if "user" not in roles:
        raise UserError(f'{where}: no message has the role "user"; add the one to be answered')
    end = len(roles) - roles[::-1].index("user")
    return [
        Message(role, _content(message, f"{where}: message {i}"))
        for i, (role, message) in enumerate(zip(roles[:end], value[:end], strict=True), start=1)
    ]


def _role(message: Any, where: str) -> str:
    if not isinstance(message, dict):
        raise UserError(f'{where} is a JSON {_kind(message)}; make it {{"role": "user", "content": "..."}}')
    role = message.get("role")
    if isinstance(role, str) and role in ROLES:
        return role
    shown = f"the role {_shown(role)}" if isinstance(role, str) else "no role in words"
    raise UserError(f"{where} has {shown}; use one of {', '.join(ROLES)}")


def _content(message: dict[str, Any], where: str) -> str:
    """A message's text, or its text parts one after the other."""
    content = message.get("content")
    if not isinstance(content, list):
        return _text(content, where)
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
    return _text("".join(texts), where)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} is a JSON {_kind(value)} where text is needed; write it as one string")
    if not value.strip():
        raise UserError(f"{where} is blank; write something into it or remove it")
    return value


def _nothing_to_answer(row: dict[str, Any], where: str) -> str:
    keys = ", ".join(map(_shown, list(row)[:8])) + (", ..." if len(row) > 8 else "")
    message = f'{where} has neither "turns" nor "messages" but {keys or "no keys at all"}'
    for key in row:
        close = get_close_matches(key.lower(), ("turns", "messages"), n=1, cutoff=0.75)
        meant = _ALIASES.get(key.lower()) or next(iter(close), None)
        if meant:
            message += f' (did you mean "{meant}" by {_shown(key)}?)'
            break
    return f"{message}; give it {_FORMAT}"


def _shown(text: str) -> str:
    """A stranger's text, quoted on one line and cut."""
    return json.dumps(text if len(text) <= 40 else f"{text[:40]}...", ensure_ascii=False)


def _kind(value: Any) -> str:
    """What JSON calls a value of this type."""
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return kinds.get(type(value), "number")
