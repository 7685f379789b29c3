"""Prompts in and out: JSON lines written and read back equal, in shards; the shipped set.

A line is `{"id", "domain", "turns": [user message, ...]}`, or `{"id", "domain", "messages": [{"role",
"content"}, ...]}` as chat APIs write it; other formats: `prompt_rows`. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dflash_core.errors import UserError
from dflash_core.fingerprint import canonical
from dflash_core.prompts.json_lines import json_line_rows, shown
from dflash_core.prompts.prompt_rows import FORMAT, to_prompt
from dflash_core.prompts.source_spec import SourceSpec
from dflash_core.types import Message, Prompt


def load_prompts(path: Path) -> list[Prompt]:
    """Every prompt of a JSON lines file, in the file's order; blank lines are skipped.

    Raises UserError if the file cannot be read, holds no prompt, or has a line that is no prompt or
    repeats an id.
    """
    prompts: list[Prompt] = []
    place_of: dict[str, str] = {}
    spec = SourceSpec(str(path))
    for number, (where, row) in enumerate(json_line_rows(path), start=1):
        prompt = to_prompt(row, where, f"{spec.name}/{number}", spec)
        place = where.removeprefix(f"{path} ")
        if prompt.id in place_of:
            raise UserError(
                f"{path} gives the id {shown(prompt.id)} on {place_of[prompt.id]} and on {place}; "
                "rename one of them"
            )
        place_of[prompt.id] = place
        prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path} holds no prompts; give it one JSON object a line with {FORMAT}")
    return prompts


def shipped_path(split: Literal["train", "gate"]) -> Path:
    """The file of a split that comes with this package; no prompt of one split is in the other."""
    resource = resources.files("dflash_core").joinpath("data", "prompts", f"{split}.jsonl")
    with resources.as_file(resource) as path:
        return path


def shipped_prompts(split: Literal["train", "gate"]) -> list[Prompt]:
    """The prompts of a shipped split."""
    return load_prompts(shipped_path(split))


class PromptsFingerprint:
    """sha256 over prompts in their order, taken one at a time: ids and domains count, the file doesn't."""

    def __init__(self) -> None:
        self._digest, self._empty = hashlib.sha256(b"["), True

    def add(self, prompt: Prompt) -> None:
        text = json.dumps(_identity(prompt), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        self._digest.update(text.encode() if self._empty else f",{text}".encode())
        self._empty = False

    def hexdigest(self) -> str:
        """64 hex digits."""
        digest = self._digest.copy()
        digest.update(b"]")
        return digest.hexdigest()


def prompts_fingerprint(prompts: Iterable[Prompt]) -> str:
    """The fingerprint of these prompts."""
    found = PromptsFingerprint()
    for prompt in prompts:
        found.add(prompt)
    return found.hexdigest()


def shards(prompts: Iterable[Prompt], size: int) -> Iterator[tuple[str, list[Prompt]]]:
    """File name and neighboring prompts, `size` of them in all but the last."""
    rest = iter(prompts)
    number = 0
    while shard := list(islice(rest, size)):
        yield f"train-{number:05d}.jsonl", shard
        number += 1


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write prompts so that `load_prompts` gives equal ones; `path` is the old file or all of the new.

    Raises UserError if the place cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as stream:
            for prompt in prompts:
                stream.write(json.dumps(prompt_row(prompt), ensure_ascii=False) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); free some space or choose another folder"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def prompt_row(prompt: Prompt) -> dict[str, Any]:
    """A prompt as a JSON object that `to_prompt` takes for an equal one."""
    row: dict[str, Any] = {"id": prompt.id, "domain": prompt.domain}
    if prompt.history:
        row["history"] = [_message_row(message) for message in prompt.history]
    row["turns"] = list(prompt.turns)
    if prompt.tools:
        row["tools"] = json.loads(prompt.tools)
    if prompt.thinking is not None:
        row["thinking"] = prompt.thinking
    return row


def _message_row(message: Message) -> dict[str, Any]:
    extra = json.loads(message.extra) if message.extra else {}
    return {"role": message.role, "content": message.content, **extra}


def _identity(prompt: Prompt) -> Any:
    """What counts of a prompt; what it does not have leaves no trace, so that later fields change nothing."""
    found = asdict(prompt)
    found["history"] = [{k: v for k, v in m.items() if v or k != "extra"} for m in found["history"]]
    return canonical(
        {k: v for k, v in found.items() if k not in ("tools", "thinking") or v not in ("", None)}
    )
