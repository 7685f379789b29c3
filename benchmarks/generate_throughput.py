"""Generation throughput: the batched engine against `transformers` generate, alone and in static batches.

    python benchmarks/generate_throughput.py TARGET [PROMPTS.jsonl] [--out FILE]

Greedy, the same prompts, one process, fp32. The static batches have as many rows as the engine may decode
together and go in the engine's order (longest prompt first); each waits for its longest answer. That all
three give the same answers is checked, and the rates count the tokens of those answers only. Without
PROMPTS the shipped prompts are answered.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig

from dflash_core.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from dflash_core.corpus.samples import render
from dflash_core.generation.batched_decoding import BatchedEngine
from dflash_core.generation.engine import GenerationSettings, Request
from dflash_core.models.target import Target, load_target
from dflash_core.prompts.prompt_files import load_prompts, shipped_prompts
from dflash_core.types import opening

Answers = dict[str, tuple[int, ...]]
WAYS = ("one_at_a_time", "static_batches", "engine")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path, nargs="?", help="JSON lines; unset: the shipped prompts")
    parser.add_argument("--count", type=int, default=24, help="prompts answered")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=8, help="prompts decoded together, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="times that every way is run, in turns")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    checkpoint = open_checkpoint(options.target)
    target, tokenizer = load_target(checkpoint.path), load_tokenizer(checkpoint)
    prompts = load_prompts(options.prompts) if options.prompts else shipped_prompts("train")
    requests = [
        Request(f"{i:04d}", tuple(render(tokenizer, opening(prompt))), seed=i)
        for i, prompt in enumerate(prompts[: options.count])
    ]
    settings = GenerationSettings(options.max_new_tokens, frozenset(checkpoint.eos_ids))
    ways = _ways(target, requests, settings, options.rows)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        answers = {}
        for way in WAYS:
            began = time.perf_counter()
            answers[way] = ways[way]()
            seconds[way].append(time.perf_counter() - began)
            print(f"{way}: {seconds[way][-1]:.1f} s", flush=True)
    expected = answers["one_at_a_time"]
    result = {
        "command": f"python benchmarks/generate_throughput.py TARGET {'PROMPTS ' if options.prompts else ''}"
        f"--count {options.count} --max-new-tokens {options.max_new_tokens} --rows {options.rows} "
        f"--threads {options.threads} --rounds {options.rounds}",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": options.threads,
        },
        "target": {"family": checkpoint.family, "parameters": checkpoint.num_parameters},
        "prompts": len(requests),
        "prompt_tokens": [min(len(r.prompt_ids) for r in requests), max(len(r.prompt_ids) for r in requests)],
        "answer_tokens": sum(map(len, expected.values())),
        "answers_stopped": sum(ids[-1] in settings.stop_ids for ids in expected.values()),
        "equal_answers": {
            way: sum(answers[way][key] == expected[key] for key in expected) for way in WAYS[1:]
        },
        **_rates(seconds, {way: sum(map(len, answers[way].values())) for way in WAYS}),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def _rates(seconds: dict[str, list[float]], tokens: dict[str, int]) -> dict[str, object]:
    """Tokens per second of each way, and the engine's against the others: medians over the rounds."""
    rates = {way: [tokens[way] / s for s in seconds[way]] for way in WAYS}
    speedups = {
        f"engine_over_{way}": statistics.median(
            mine / other for mine, other in zip(rates["engine"], rates[way], strict=True)
        )
        for way in WAYS[:2]
    }
    return {"tokens_per_second": {way: statistics.median(rates[way]) for way in WAYS}, **speedups}


def _ways(
    target: Target, requests: list[Request], settings: GenerationSettings, rows: int
) -> dict[str, Callable[[], Answers]]:
    longest_first = sorted(requests, key=lambda r: (-len(r.prompt_ids), r.id))
    longest = len(longest_first[0].prompt_ids) + settings.max_new_tokens

    def in_batches(size: int) -> Answers:
        batches = [longest_first[i : i + size] for i in range(0, len(longest_first), size)]
        return {key: ids for batch in batches for key, ids in _generate(target, batch, settings).items()}

    def engine() -> Answers:
        batched = BatchedEngine(target, settings, batch_tokens=rows * longest)
        batched.submit(requests)
        return {answer.id: answer.token_ids for answer in batched.answers()}

    return {
        "one_at_a_time": lambda: in_batches(1),
        "static_batches": lambda: in_batches(rows),
        "engine": engine,
    }


def _generate(target: Target, batch: list[Request], settings: GenerationSettings) -> Answers:
    """One call of `transformers` generate, padded on the left."""
    longest = max(len(r.prompt_ids) for r in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(batch):
        ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, longest - len(request.prompt_ids) :] = 1
    stops = sorted(settings.stop_ids)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=settings.max_new_tokens, eos_token_id=stops, pad_token_id=stops[0]
    )
    with torch.inference_mode():
        output = target.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return {
        request.id: _cut(row[longest:].tolist(), settings) for request, row in zip(batch, output, strict=True)
    }


def _cut(ids: list[int], settings: GenerationSettings) -> tuple[int, ...]:
    """Up to and including the first stop token."""
    end = next((i for i, token in enumerate(ids) if token in settings.stop_ids), len(ids) - 1)
    return tuple(ids[: end + 1])


if __name__ == "__main__":
    main()
