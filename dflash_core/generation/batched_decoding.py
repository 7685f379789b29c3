"""The default generation engine: batched decoding on the target's own forward, refilled as rows finish.

A finished row leaves at once and a waiting request takes its place, so that no answer waits for the
longest of its batch. What is decoded together is bounded in tokens: rows x the longest that one of them
can become, which is what the KV cache holds.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor

from dflash_core.generation.engine import Answer, GenerationSettings, Request, ending
from dflash_core.generation.row_cache import moves
from dflash_core.generation.sampling import choose
from dflash_core.models.target import Target

PREFILL_TOKENS = 4096
"""Of prompts read in one forward, padding included; a longer prompt passes alone."""


@dataclass
class _Row:
    """A request that is being answered."""

    request: Request
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)


class BatchedEngine:
    """Answers requests with a loaded target. See `engine.Engine`.

    batch_tokens: rows x (the longest prompt among them + max_new_tokens) stays below it; a request that is
    longer by itself is answered alone, and so is every request of a target whose rotary positions depend
    on the longest sequence beside it.
    """

    def __init__(self, target: Target, settings: GenerationSettings, *, batch_tokens: int) -> None:
        self.target, self.settings = target, settings
        self.batch_tokens = 1 if target.rotates_by_length() else batch_tokens
        self._waiting: list[tuple[int, str, Request]] = []
        self._rows: list[_Row] = []
        self._cache = target.new_rows()

    @property
    def version(self) -> str:
        return f"transformers {transformers.__version__}, batched"

    def submit(self, requests: Iterable[Request]) -> None:
        # Longest first: neighbors are of a length, and memory that does not suffice shows at the start.
        for request in requests:
            heapq.heappush(self._waiting, (-len(request.prompt_ids), request.id, request))

    @torch.inference_mode()
    def answers(self) -> Iterator[Answer]:
        while self._waiting or self._rows:
            while newcomers := self._admitted():
                self._prefill(newcomers)
                yield from self._finished()
            if self._rows:
                self._step()
                yield from self._finished()
        self._cache = self.target.new_rows()  # its memory is not needed until the next requests

    def _admitted(self) -> list[Request]:
        """Waiting requests that fit beside the rows under way and are short enough for one forward."""
        chosen: list[Request] = []
        longest = max((len(row.request.prompt_ids) for row in self._rows), default=0)
        while self._waiting:
            length = len(self._waiting[0][2].prompt_ids)
            longest, count = max(longest, length), len(chosen) + 1
            widest = max(length, len(chosen[0].prompt_ids) if chosen else 0)
            rows = len(self._rows) + count
            if rows > 1 and rows * (longest + self.settings.max_new_tokens) > self.batch_tokens:
                break
            if chosen and count * widest > PREFILL_TOKENS:
                break
            chosen.append(heapq.heappop(self._waiting)[2])
        return chosen

    def _prefill(self, requests: list[Request]) -> None:
        """Read the prompts of new rows, draw their first tokens and put them behind the others."""
        lengths = [len(request.prompt_ids) for request in requests]
        ids = torch.zeros(len(requests), max(lengths), dtype=torch.int64)
        for row, request in enumerate(requests):
            ids[row, : lengths[row]] = torch.tensor(request.prompt_ids)
        device = self.target.device
        cache = self.target.new_rows()
        cache.add_rows(len(requests))
        last = torch.tensor(lengths, device=device) - 1
        output = self.target.forward_rows(ids.to(device), cache, logits_at=last)
        cache.keep(lengths)
        self._cache.append(cache)
        rows = [_Row(request, torch.Generator().manual_seed(request.seed)) for request in requests]
        self._rows += rows
        self._extend(rows, output.logits[:, 0])

    def _step(self) -> None:
        """One more token for every row."""
        ids = torch.tensor([[row.token_ids[-1]] for row in self._rows], device=self.target.device)
        output = self.target.forward_rows(ids, self._cache)
        self._cache.keep([1] * len(self._rows))
        self._extend(self._rows, output.logits[:, 0])

    def _extend(self, rows: list[_Row], logits: Tensor) -> None:
        draws = torch.empty(0, dtype=torch.float64)
        if self.settings.temperature > 0:
            draws = torch.stack([torch.rand((), dtype=torch.float64, generator=r.generator) for r in rows])
        tokens = choose(logits, draws.to(logits.device), self.settings.temperature, self.settings.top_p)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.token_ids.append(token)

    def _finished(self) -> Iterator[Answer]:
        """Take the rows out that have ended."""
        ended = [
            (i, how) for i, row in enumerate(self._rows) if (how := ending(row.token_ids, self.settings))
        ]
        if not ended:
            return
        finished = [Answer(self._rows[i].request.id, tuple(self._rows[i].token_ids), how) for i, how in ended]
        gone = [i for i, _ in ended]
        for place, mover in moves(len(self._rows), gone):
            self._rows[place] = self._rows[mover]
        del self._rows[len(self._rows) - len(gone) :]
        self._cache.drop(gone)
        yield from finished
