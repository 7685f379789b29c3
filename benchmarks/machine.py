"""What the benchmarks of extraction share: the machine in words, and real samples of a given size."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from dflash_core.corpus.samples import render
from dflash_core.prompts.prompt_files import load_prompts
from dflash_core.types import Sample, opening


def describe() -> dict[str, Any]:
    """For a result file."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def read_samples(target: Path, prompts: Path, tokens: int) -> list[Sample]:
    """Rendered conversations, about `tokens` tokens in all, sorted by length.

    A prompt's own text is repeated behind it as if it were the answer: lengths and words are real, and
    no answer need be generated.
    """
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    samples, total = [], 0
    for prompt in load_prompts(prompts):
        ids = render(tokenizer, opening(prompt))
        answer = tokenizer(" ".join(prompt.turns), add_special_tokens=False)["input_ids"]
        samples.append(
            Sample(prompt.id, prompt.domain, (*ids, *answer), ((len(ids), len(ids) + len(answer)),))
        )
        total += len(samples[-1].input_ids)
        if total >= tokens:
            break
    return sorted(samples, key=lambda s: (len(s.input_ids), s.id))
