"""Stage `inspect`: choose the prompts, render every one as serving would, check that it fits, freeze them.

Its artifact is what later stages read: `train-NNNNN.jsonl`, one shard of prompts each, and `gate.jsonl`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property

from dflash_core.artifacts import Workspace
from dflash_core.errors import UserError
from dflash_core.fingerprint import fingerprint
from dflash_core.prompts import load_prompts, prompts_fingerprint, shipped_prompts, write_prompts
from dflash_core.types import Checkpoint, Message, Prompt, opening
from pipelines.config import RealignConfig
from pipelines.context import Context
from pipelines.plan import Plan
from pipelines.stage import StageResult

CODE_VERSION = 2
_GATE_SHARE = 8
"""One prompt in so many of the user's own is held out when no gate prompts are given."""


@dataclass(frozen=True)
class PromptSets:
    """The prompts to train on and those to gate on; no conversation is in both."""

    train: tuple[Prompt, ...]
    gate: tuple[Prompt, ...]
    source: str
    """Where they come from, in words."""
    num_contaminated: int
    """Training prompts left out because the gate asks the same."""

    @cached_property
    def train_fingerprint(self) -> str:
        return prompts_fingerprint(list(self.train))

    @cached_property
    def gate_fingerprint(self) -> str:
        return prompts_fingerprint(list(self.gate))


def choose_prompts(config: RealignConfig) -> PromptSets:
    """The prompts that the config names, or the shipped ones; disjoint by text.

    With training prompts of the user's but no gate prompts, a share of them, chosen by the hash of
    their text so that it never changes, is held out. Raises UserError if a file is unusable.
    """
    train = load_prompts(config.prompts) if config.prompts else shipped_prompts("train")
    if config.eval_prompts:
        gate, source = load_prompts(config.eval_prompts), f"{config.eval_prompts}"
    elif config.prompts:
        gate = [p for p in train if _held_out(p)]
        train = [p for p in train if not _held_out(p)]
        source = f"one in {_GATE_SHARE} of {config.prompts}"
        if not gate:
            raise UserError(
                f"{config.prompts} is too small to hold gate prompts out of it; pass --eval-prompts"
            )
    else:
        gate, source = shipped_prompts("gate"), "the shipped gate prompts"
    asked = {_text_key(p) for p in gate}
    kept = [p for p in train if _text_key(p) not in asked]
    if not kept:
        raise UserError("every training prompt is also a gate prompt; pass other --prompts")
    gate = _subset(gate, config.evaluate.num_prompts, config.seed)
    if len(gate) < config.gate.min_prompts:
        raise UserError(
            f"{len(gate)} gate prompts ({source}) are too few to decide on: give at least "
            f"{config.gate.min_prompts} with --eval-prompts, or lower --gate.min-prompts"
        )
    return PromptSets(
        train=tuple(_subset(kept, config.generate.num_prompts, config.seed)),
        gate=tuple(gate),
        source=f"{config.prompts or 'the shipped prompts'}; gated on {source}",
        num_contaminated=len(train) - len(kept),
    )


def _text_key(prompt: Prompt) -> str:
    return fingerprint([[m.content for m in prompt.history], [" ".join(t.split()) for t in prompt.turns]])


def _held_out(prompt: Prompt) -> bool:
    return int(_text_key(prompt)[:8], 16) % _GATE_SHARE == 0


def _subset(prompts: list[Prompt], count: int | None, seed: int) -> list[Prompt]:
    """`count` prompts drawn over all domains, in their own order."""
    if count is None or count >= len(prompts):
        return prompts
    chosen = sorted(random.Random(seed).sample(range(len(prompts)), count))
    return [prompts[i] for i in chosen]


def plan(context: Context, prompts: PromptSets) -> Plan:
    """What the frozen prompts depend on."""
    inputs = {
        "target": context.checkpoint.fingerprint,
        "train": prompts.train_fingerprint,
        "gate": prompts.gate_fingerprint,
        "train_new_tokens": context.config.generate.max_new_tokens,
        "gate_new_tokens": context.config.evaluate.max_new_tokens,
        "shard_prompts": context.config.generate.shard_prompts,
    }
    return Plan("inspect", inputs, CODE_VERSION)


def run(context: Context, planned: Plan, prompts: PromptSets) -> StageResult:
    """Freeze the prompts for this target. Raises UserError if one of the user's own does not fit."""
    checkpoint, config = context.checkpoint, context.config

    def body(workspace: Workspace) -> dict[str, object]:
        train, gate = (
            _fitting(checkpoint, chosen, new_tokens or 0, strict=path is not None)
            for chosen, new_tokens, path in (
                (prompts.train, config.generate.max_new_tokens, config.prompts),
                (prompts.gate, config.evaluate.max_new_tokens, config.eval_prompts or config.prompts),
            )
        )
        shards = _shards(train, config.generate.shard_prompts or 256)
        with workspace.scratch() as scratch:
            for name, chosen in (*shards.items(), ("gate.jsonl", gate)):
                write_prompts(scratch / name, chosen)
                workspace.put(name, scratch / name)
        return {
            "num_train": len(train),
            "train_shards": list(shards),
            "num_gate": len(gate),
            "num_contaminated": prompts.num_contaminated,
            "num_too_long": len(prompts.train) + len(prompts.gate) - len(train) - len(gate),
            "source": prompts.source,
        }

    return planned.run(context, body)


def _shards(prompts: list[Prompt], size: int) -> dict[str, list[Prompt]]:
    """File name -> neighboring prompts."""
    starts = range(0, len(prompts), size)
    return {f"train-{number:05d}.jsonl": prompts[s : s + size] for number, s in enumerate(starts)}


def _fitting(
    checkpoint: Checkpoint, prompts: tuple[Prompt, ...], max_new_tokens: int, *, strict: bool
) -> list[Prompt]:
    """The prompts that leave room for their answers in the target's context.

    Raises UserError for the first that does not: at once if `strict`, since the user meant it to be
    used; of the shipped ones, which know nothing of the target, only if none is left.
    """
    from dflash_core.checkpoint import load_tokenizer
    from dflash_core.corpus import check_length, render

    tokenizer = load_tokenizer(checkpoint)
    kept: list[Prompt] = []
    refused: UserError | None = None
    for prompt in prompts:
        length = len(render(tokenizer, _all_questions(prompt)))
        try:
            room = max_new_tokens * len(prompt.turns)
            check_length(prompt.id, length, room, checkpoint.config.max_positions)
        except UserError as error:
            if strict:
                raise
            refused = error
        else:
            kept.append(prompt)
    if not kept and refused is not None:
        raise refused
    return kept


def _all_questions(prompt: Prompt) -> list[Message]:
    """The conversation with empty answers: what its last turn is rendered as, but for the answers."""
    later = [Message("user", turn) for turn in prompt.turns[1:]]
    return [*opening(prompt), *(m for turn in later for m in (Message("assistant", ""), turn))]
