"""Prompts to token ids, and the target's answers to samples.

A prompt is rendered through the target's own chat template exactly as serving renders it; a sample
is those ids followed by the ids that the target generated, so that the response is known by its
index and never searched for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dflash_core.checkpoints.strict_json import one_line
from dflash_core.errors import UserError
from dflash_core.types import Message, Prompt, Sample, opening

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: str = "",
    thinking: bool | None = None,
    name: str = "",
) -> list[int]:
    """Token ids of the conversation with the assistant's turn opened.

    tools, thinking: as in Prompt. name: the prompt's id, for the UserError if the template fails.
    """
    encoded = _apply(tokenizer, messages, tools, thinking, name, tokenize=True, return_dict=True)
    return list(cast("dict[str, list[int]]", encoded)["input_ids"])


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: str = "",
    thinking: bool | None = None,
    name: str = "",
) -> str:
    """The text whose tokens `render` gives."""
    return str(_apply(tokenizer, messages, tools, thinking, name, tokenize=False))


def check_tools(tokenizer: PreTrainedTokenizerBase, prompts: Iterable[Prompt]) -> None:
    """Raise UserError if the first prompt with tools is rendered as if it had none."""
    asked = next((prompt for prompt in prompts if prompt.tools), None)
    if asked is None:
        return
    messages = opening(asked)
    with_tools, without = (
        render_text(tokenizer, messages, tools=tools, thinking=asked.thinking, name=asked.id)
        for tools in (asked.tools, "")
    )
    if with_tools == without:
        raise UserError(
            f"prompt {asked.id!r} has tools, but the target's chat template does not show them to the model; "
            "leave `tools` out of the prompts or pass another --chat-template"
        )


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: str,
    thinking: bool | None,
    name: str,
    **how: Any,
) -> Any:
    told: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    told["tools"] = json.loads(tools) if tools else None
    conversation = [_plain(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(conversation, **{"add_generation_prompt": True, **how, **told})
    except Exception as error:  # a template is the user's program and can raise anything
        raise UserError(
            f"the chat template cannot render {f'prompt {name!r}' if name else 'a conversation'} "
            f"with the roles {', '.join(m.role for m in messages)} ({one_line(error)}); "
            "mend the prompt or pass another --chat-template"
        ) from error


def _plain(message: Message) -> dict[str, Any]:
    extra = json.loads(message.extra) if message.extra else {}
    row = {"role": message.role, "content": message.content, **extra}
    # Engines show a template no null: a call without words has the empty text.
    return {**row, "content": ""} if row["content"] is None else row


def answer_text(tokenizer: PreTrainedTokenizerBase, response_ids: Sequence[int]) -> str:
    """A response as the next turn of its conversation shows it: text without special tokens."""
    return str(tokenizer.decode(list(response_ids), skip_special_tokens=True))


def check_length(prompt_id: str, length: int, max_new_tokens: int, max_positions: int) -> None:
    """Raise UserError if a rendered prompt leaves no room for its answer in the target's context."""
    if length + max_new_tokens > max_positions:
        raise UserError(
            f"prompt {prompt_id!r} is {length} tokens long and its answer may take {max_new_tokens}, but the "
            f"target's context holds {max_positions}; shorten the prompt or lower the answer's length"
        )


def write_samples(path: Path, samples: Iterable[Sample]) -> int:
    """Write samples as JSON lines; returns how many."""
    count = 0
    with path.open("w", encoding="utf-8") as stream:
        for sample in samples:
            row = {
                "id": sample.id,
                "domain": sample.domain,
                "input_ids": list(sample.input_ids),
                "spans": sample.spans,
            }
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    return count


def read_samples(path: Path) -> Iterator[Sample]:
    """Read what `write_samples` wrote, one at a time."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            spans = tuple((start, end) for start, end in row["spans"])
            yield Sample(row["id"], row["domain"], tuple(row["input_ids"]), spans)
