"""Prompts to token ids, and the target's answers to samples.

A prompt is rendered through the target's own chat template exactly as serving renders it; a sample
is those ids followed by the ids that the target generated, so that the response is known by its
index and never searched for.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import GenerationConfig

from dflash_core.errors import UserError
from dflash_core.target import Target
from dflash_core.types import Message, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: str = "",
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of the conversation with the assistant's turn opened; `tools`, `thinking`: as in Prompt."""
    encoded = _apply(tokenizer, messages, tools, thinking, tokenize=True, return_dict=True)
    return list(cast("dict[str, list[int]]", encoded)["input_ids"])


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: str = "",
    thinking: bool | None = None,
) -> str:
    """The text whose tokens `render` gives."""
    return str(_apply(tokenizer, messages, tools, thinking, tokenize=False))


def _apply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: str,
    thinking: bool | None,
    **how: Any,
) -> Any:
    told: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    told["tools"] = json.loads(tools) if tools else None
    conversation = [_plain(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(conversation, **{"add_generation_prompt": True, **how, **told})
    except Exception as error:  # a template is the user's program and can raise anything
        raise UserError(
            f"the chat template cannot render the roles {[m.role for m in messages]} ({error}); "
            "mend the prompts or pass --chat-template"
        ) from error


def _plain(message: Message) -> dict[str, Any]:
    extra = json.loads(message.extra) if message.extra else {}
    return {"role": message.role, "content": message.content, **extra}


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


@torch.inference_mode()
def generate_batch(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
    temperature: float,
    seed: int,
) -> list[list[int]]:
    """The target's responses to rendered prompts, the stop token included where one was reached.

    Rows are padded on the left; a row ends at its own stop token.
    """
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    stops = sorted(stop_ids)
    # transformers fills what is None from defaults of its own (top_k 50, when sampling); `Target` has
    # dropped the checkpoint's.
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    settings = GenerationConfig(
        **sampling,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=stops[0] if stops else 0,
    )
    torch.manual_seed(seed)
    output = target.model.generate(
        input_ids=ids.to(target.device),
        attention_mask=mask.to(target.device),
        generation_config=settings,
    )
    return [cut_at_stop(row[longest:].tolist(), stop_ids) for row in output]


def cut_at_stop(ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """`ids` up to and including the first stop token."""
    end = next((i for i, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: end + 1]


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
