"""Which prompts are trained on and which gate: drawn from sources, split, free of each other's questions.

Everything streams: the training side is never held, of the gate's only what the gate asks. What is written:
`gate.jsonl`, the training prompts in `train-NNNNN.jsonl`, and `contamination.jsonl`, which names every
training prompt that repeats a gate prompt and was therefore left out.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dflash_core.corpus.trace_rows import without_answer
from dflash_core.corpus.trace_shards import write_trace_shards
from dflash_core.errors import UserError
from dflash_core.prompts.draw import Advance, Drawn, draw
from dflash_core.prompts.overlap import GateIndex, is_held_out
from dflash_core.prompts.prompt_files import PromptsFingerprint, prompts_fingerprint, shards, write_prompts
from dflash_core.prompts.prompt_ids import check_ids, id_hash
from dflash_core.prompts.sources import Source
from dflash_core.prompts.thinking import Thinking, with_thinking
from dflash_core.types import Prompt, Trace, opening

_SHARD_PROMPTS = 1024
_BYTES_PER_TOKEN = 3
"""What an id counts as, where there is no text."""

Put = Callable[[str, Path], object]
"""Takes a finished file by its name."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class PromptRequest:
    """What is to be drawn from where."""

    train: tuple[Source, ...]
    gate: tuple[Source, ...]
    """Empty: the held-out side of the training sources."""
    held_out_share: float
    num_train: int | None
    num_gate: int | None
    seed: int
    thinking: Thinking
    keep_shares: bool = False
    """Rather fewer training prompts than `num_train` than other shares than the weights say."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the choice depends on; the sources by their content."""
        return {
            "train": [{**source.identity, "weight": source.spec.weight} for source in self.train],
            "gate": [{**source.identity, "weight": source.spec.weight} for source in self.gate],
            "held_out_share": None if self.gate else self.held_out_share,
            "num_train": self.num_train,
            "num_gate": self.num_gate,
            "seed": self.seed,
            "thinking": self.thinking,
            "keep_shares": self.keep_shares,
        }

    @property
    def traces(self) -> bool:
        """Whether the training sources bring their answers along."""
        return any(source.spec.traces for source in self.train)

    def check_unchanged(self) -> None:
        """Raise UserError if a source's files are not those that its identity is of."""
        for source in (*self.train, *self.gate):
            source.check_unchanged()

    @property
    def train_name(self) -> str:
        """The training sources, in words."""
        return " + ".join(source.spec.location for source in self.train)

    @property
    def gate_name(self) -> str:
        """Where the gate prompts come from, in words."""
        if self.gate:
            return " + ".join(source.spec.location for source in self.gate)
        return f"{100 * self.held_out_share:.3g}% of {self.train_name}, held out"


def choose(
    request: PromptRequest, scratch: Path, put: Put, *, min_gate: int, advance: Advance, say: Say
) -> dict[str, Any]:
    """Draw, split and write; returns what there is to say of it, as plain data.

    Raises UserError for rows that are no prompts, for sources too small to train or to gate on, and for
    files that are not what was hashed any more: then nothing of what was `put` may be kept.
    """
    try:
        meta = _choose(request, scratch, put, min_gate=min_gate, advance=advance, say=say)
    except UserError:
        request.check_unchanged()  # half a file is refused for many reasons, and this is the true one
        raise
    request.check_unchanged()
    return meta


def _choose(
    request: PromptRequest, scratch: Path, put: Put, *, min_gate: int, advance: Advance, say: Say
) -> dict[str, Any]:
    drawn_gate = _draw_gate(request, min_gate, advance)
    gate = [without_answer(p) if isinstance(p, Trace) else p for p in drawn_gate.prompts(advance)]
    expanded = list(with_thinking(gate, request.thinking))
    check_ids(array("Q", map(id_hash, expanded)), lambda: expanded, request.gate_name)
    filter_ = _TrainSide(request, GateIndex(gate))
    with (scratch / "contamination.jsonl").open("w", encoding="utf-8") as stream:
        filter_.on_match = lambda row: stream.write(json.dumps(row, ensure_ascii=False) + "\n")
        drawn = draw(
            request.train,
            request.num_train,
            seed=request.seed,
            accept=filter_,
            keep_shares=request.keep_shares,
            advance=advance,
        )
    if not sum(drawn.counts):
        flag = "--traces" if request.traces else "--prompts"
        why = filter_.why_none(drawn)
        raise UserError(f"no prompt of {request.train_name} is left to train on ({why}); pass other {flag}")
    _write(scratch, "gate.jsonl", expanded, put)
    put("contamination.jsonl", scratch / "contamination.jsonl")
    for line in (*_notes(request, drawn), *filter_.notes()):
        say(f"prompts: {line}")
    # Of an answer that was logged it is settled whether it was thought about.
    thinking = "default" if request.traces else request.thinking
    train = _Counted(with_thinking(drawn.prompts(advance), thinking))
    names = _write_train(train, scratch, put, sum(drawn.counts) if request.traces else None)
    check_ids(train.ids, lambda: with_thinking(drawn.prompts(), thinking), request.train_name)
    return {
        **train.totals(),
        "train_shards": names,
        "num_gate": len(expanded),
        "gate_fingerprint": prompts_fingerprint(expanded),
        "num_rows": drawn.num_rows,
        "num_duplicates": drawn.num_duplicates,
        "num_bad": drawn.num_bad,
        "num_held_out": filter_.num_held_out,
        "contamination": dict(filter_.found),
        "drawn": [
            {"source": s.spec.location, "prompts": count, "of": size}
            for s, count, size in zip(drawn.sources, drawn.counts, drawn.sizes, strict=True)
        ],
        "source": f"{request.train_name}; gated on {request.gate_name}",
    }


def check_gate_size(num_gate: int, min_gate: int, request: PromptRequest) -> None:
    """Raise UserError if there are fewer gate prompts than the gate decides on."""
    if num_gate >= min_gate:
        return
    count = "1 gate prompt is" if num_gate == 1 else f"{num_gate} gate prompts are"
    share = "" if request.gate else "hold more out with --evaluate.held-out-share, "
    asked = (
        "" if request.num_gate is None or request.num_gate >= min_gate else "raise --evaluate.num-prompts, "
    )
    raise UserError(
        f"{count} too few to decide on ({request.gate_name}; the gate wants {min_gate}): {share}{asked}"
        f"give at least {min_gate} with --eval-prompts, or lower --gate.min-prompts"
    )


def _draw_gate(request: PromptRequest, min_gate: int, advance: Advance) -> Drawn:
    def held_out(prompt: Prompt) -> bool:
        if not request.gate and not opening(prompt):
            raise UserError(
                f"trace {prompt.id} has token ids and no messages, so that no prompts can be held out; "
                "pass --eval-prompts"
            )
        return bool(request.gate) or is_held_out(prompt, request.held_out_share)

    sources = request.gate or request.train
    drawn = draw(sources, request.num_gate, seed=request.seed, accept=held_out, advance=advance)
    ways = 2 if request.thinking == "both" else 1
    check_gate_size(sum(drawn.counts) * ways, min_gate, request)
    return drawn


class _TrainSide:
    """Whether a prompt may be trained on; counts what may not."""

    def __init__(self, request: PromptRequest, gate: GateIndex) -> None:
        self._share = 0.0 if request.gate else request.held_out_share
        self._gate = gate
        self.num_held_out = 0
        self.found: Counter[str] = Counter(exact=0, near=0)
        self.on_match: Callable[[dict[str, Any]], object] = lambda _row: None

    def __call__(self, prompt: Prompt) -> bool:
        if self._share and is_held_out(prompt, self._share):
            self.num_held_out += 1
            return False
        match = self._gate.match(prompt)
        if match is None:
            return True
        kind = "exact" if match.exact else "near"
        self.found[kind] += 1
        overlap = round(match.overlap, 4)
        self.on_match({"train": prompt.id, "gate": match.gate_id, "overlap": overlap, "kind": kind})
        return False

    def why_none(self, drawn: Drawn) -> str:
        """What became of the prompts, where none is drawn."""
        empty = [s.spec.location for s, size in zip(drawn.sources, drawn.sizes, strict=True) if not size]
        reasons = {
            "ask the same as a gate prompt": self.found["exact"],
            "ask nearly the same as a gate prompt": self.found["near"],
            "are held out as gate prompts": self.num_held_out,
            "are no prompts": drawn.num_bad,
            "repeat another": drawn.num_duplicates,
        }
        told = [f"{count:,} {reason}" for reason, count in reasons.items() if count]
        if len(empty) < len(drawn.sources):
            told.append("the sources' weights leave nothing of the others" if empty else "none was asked for")
        return f"of {drawn.num_rows + drawn.num_bad:,} rows " + ", ".join(told)

    def notes(self) -> list[str]:
        if not self.found.total():
            return []
        how = f"{self.found['exact']:,} the same, {self.found['near']:,} nearly"
        total = f"{self.found.total():,} training prompts"
        return [f"{total} ask what the gate asks ({how}) and are left out; contamination.jsonl names them"]


class _Counted:
    """Prompts on their way to the shards, counted and fingerprinted."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts, self._fingerprint = prompts, PromptsFingerprint()
        self._num = self._answers = self._bytes = 0
        self.ids = array("Q")
        """Hashes of the ids."""

    def __iter__(self) -> Iterator[Prompt]:
        for prompt in self._prompts:
            self._fingerprint.add(prompt)
            self._num += 1
            self.ids.append(id_hash(prompt))
            self._answers += prompt.num_answers
            texts = [*prompt.turns, *(m.content for m in prompt.history)]
            if isinstance(prompt, Trace):
                texts.append(prompt.answer)
                self._bytes += _BYTES_PER_TOKEN * len(prompt.prompt_ids + prompt.answer_ids)
            self._bytes += sum(len(text.encode()) for text in texts)
            yield prompt

    def totals(self) -> dict[str, Any]:
        return {
            "num_train": self._num,
            "num_answers": self._answers,
            "text_bytes": self._bytes,
            "train_fingerprint": self._fingerprint.hexdigest(),
        }


def _notes(request: PromptRequest, drawn: Drawn) -> list[str]:
    notes = []
    each = list(zip(drawn.sources, drawn.counts, drawn.sizes, strict=True))
    if len(each) > 1:
        listed = ", ".join(f"{s.spec.location} {count:,} of {size:,}" for s, count, size in each)
        notes.append(f"drawn from {listed}")
    empty = [s.spec.location for s, count, size in each if count == size]
    if any(s.spec.weight for s in drawn.sources) and 0 < len(empty) < len(each):
        short = request.num_train is not None and not request.keep_shares
        more = "the others make up for what it lacks" if short else "its weight lets no more of the others in"
        notes.append(f"{', '.join(empty)} gave all there is; {more}")
    if drawn.num_duplicates:
        notes.append(f"{drawn.num_duplicates:,} repeat another word for word and are left out")
    if drawn.num_bad:
        notes.append(f"{drawn.num_bad:,} rows are no prompts and left out, such as: {drawn.bad[0]}")
    return notes


def _write_train(train: _Counted, scratch: Path, put: Put, num_traces: int | None) -> list[str]:
    """The shards' names; num_traces: None for prompts."""
    if num_traces is not None:
        names = write_trace_shards(scratch, cast("Iterable[Trace]", train), num_traces)
        for name in names:
            put(name, scratch / name)
        return names
    names = []
    for name, shard in shards(train, _SHARD_PROMPTS):
        _write(scratch, name, shard, put)
        names.append(name)
    return names


def _write(scratch: Path, name: str, prompts: list[Prompt], put: Put) -> None:
    write_prompts(scratch / name, prompts)
    put(name, scratch / name)
