"""Fine-tune a target briefly to another house style, so that there is real drift to realign after.

    python benchmarks/finetune_style.py TARGET SAMPLES_DIR OUT [--steps 24]

SAMPLES_DIR is a `generate` artifact of a store (`samples-*.jsonl`): the target's own answers are rewritten
(one sentence a line, each opened by ">> ", all in capitals) and the target is trained on them with AdamW.
The result is an ordinary checkpoint of the same family.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_core.corpus.samples import read_samples


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("samples", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rows", type=int, default=4, help="answers per step")
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95))
    model.train()
    examples = rewritten(tokenizer, options.samples)
    for step in range(options.steps):
        total = 0.0
        optimizer.zero_grad(set_to_none=True)
        for _ in range(options.rows):
            ids, start = next(examples)
            logits = model(input_ids=ids[None]).logits[0, start - 1 : -1]
            loss = F.cross_entropy(logits, ids[start:]) / options.rows
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step + 1}/{options.steps}: loss {total:.3f}", flush=True)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


def rewritten(tokenizer: object, folder: Path) -> Iterator[tuple[torch.Tensor, int]]:
    """Endless (token ids, index of the first answer token)."""
    samples = [s for path in sorted(folder.glob("samples-*.jsonl")) for s in read_samples(path)]
    while True:
        for sample in samples:
            ((start, end),) = sample.spans
            prompt = list(sample.input_ids[:start])
            answer = tokenizer.decode(sample.input_ids[start:end], skip_special_tokens=True)
            end = tokenizer.eos_token_id
            styled = tokenizer(restyle(answer), add_special_tokens=False)["input_ids"][:96]
            yield torch.tensor([*prompt, *styled, end]), len(prompt)


def restyle(answer: str) -> str:
    """One sentence a line, each opened by ">> ", in capitals."""
    sentences = re.split(r"(?<=[.!?])\s+|\n+", answer)
    return "\n".join(f">> {s.strip().upper()}" for s in sentences if s.strip())


if __name__ == "__main__":
    main()
