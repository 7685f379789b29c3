"""Acceptance of any drafter on any target, in this process: what `jobs/evaluate.py` runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core.checkpoints.checkpoint import load_tokenizer, open_checkpoint, resolve_target
from dflash_core.errors import UserError
from dflash_core.fingerprint import file_sha256
from dflash_core.models.drafter_config import check_fits, read_drafter_config
from dflash_core.models.drafter_identity import FILES, drafter_fingerprint
from dflash_core.prompts.prompt_files import shipped_prompts
from dflash_core.prompts.sources import open_sources
from dflash_core.prompts.thinking import check_thinking, with_thinking
from dflash_core.types import AcceptanceReport, Checkpoint, Prompt
from pipelines.measure_config import MeasureConfig
from pipelines.telemetry import progress, say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def measure(config: MeasureConfig) -> AcceptanceReport:
    """Decode every prompt with the drafter. Raises UserError for anything that does not fit together."""
    drafter_config = read_drafter_config(config.drafter)
    checkpoint = open_checkpoint(
        resolve_target(config.target), chat_template=read_chat_template(config.chat_template)
    )
    check_fits(drafter_config, checkpoint.config, where=str(config.drafter))
    check_thinking(checkpoint, config.thinking)
    tokenizer = load_tokenizer(checkpoint)
    prompts = _fitting(config, checkpoint, tokenizer)

    import torch

    from dflash_core.decoding.evaluation import DecodeSettings, evaluate_prompt
    from dflash_core.models.drafter import load_drafter
    from dflash_core.models.target import load_target
    from pipelines.placement import torch_dtype

    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = config.dtype if config.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    dtype = torch_dtype(name)
    drafter = load_drafter(config.drafter, device=device, dtype=dtype)
    target = load_target(checkpoint.path, device=device, dtype=dtype)
    settings = DecodeSettings(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        stop_ids=checkpoint.eos_ids,
        max_positions=checkpoint.config.max_positions,
        seed=config.seed,
    )
    results = []
    with progress("evaluate", len(prompts), "prompts") as bar:
        for prompt in prompts:
            results.append(evaluate_prompt(target, drafter, tokenizer, prompt, settings))
            bar.advance(1, tokens=results[-1].num_tokens, rounds=results[-1].num_rounds)
    return AcceptanceReport(
        block_size=drafter_config.block_size,
        prompts=tuple(results),
        drafter_fingerprint=drafter_fingerprint({file: file_sha256(config.drafter / file) for file in FILES}),
        target_fingerprint=checkpoint.fingerprint,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
    )


def _fitting(
    config: MeasureConfig, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The prompts that leave room for their answers; the others are left out, before anything is loaded."""
    from dflash_core.corpus.samples import check_tools
    from dflash_core.prompts.prompt_lengths import FittingPrompts

    room = checkpoint.config.max_positions
    lengths = FittingPrompts(tokenizer, config.max_new_tokens, room, any_share=config.prompts is None)
    asked = with_thinking(_prompts(config), config.thinking)
    prompts = list(lengths.of(asked, lambda _count: None))
    lengths.conclude()
    check_tools(tokenizer, prompts)
    if lengths.num_too_long:
        say(f"prompts: {lengths.num_too_long:,} too long for this target's {room:,} positions are left out")
    return prompts


def _prompts(config: MeasureConfig) -> Iterator[Prompt]:
    """The first ones of the sources taken in turn. Raises UserError for one that is not there."""
    if config.prompts is None:
        yield from islice(shipped_prompts("gate"), config.num_prompts)
        return
    streams = [source.prompts() for source in open_sources(config.prompts)]
    rounds = (prompt for row in zip_longest(*streams) for prompt in row if prompt is not None)
    yield from islice(rounds, config.num_prompts)


def read_chat_template(path: Path | None) -> str | None:
    """The text of a `--chat-template` file; None where none is given. Raises UserError if unreadable."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no file {path} to be the --chat-template; check the path") from None
    except OSError as error:
        raise UserError(
            f"--chat-template {path} cannot be read ({error.strerror}); pass a text file"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"--chat-template {path} is not UTF-8 text; save it as UTF-8") from None
