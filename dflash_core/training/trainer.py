"""The training loop: the step, the held-out measurement, checkpoints that resume exactly.

Which documents and anchors a step sees is a function of (seed, step) alone, so a run that was killed
and resumed walks the same path as one that was not. Knows nothing of Ray: `Reducer` is how several
workers agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.features.feature_shards import FeatureSet
from dflash_core.models.drafter import Drafter
from dflash_core.training import held_out
from dflash_core.training.anchors import draw_anchors, possible_anchors
from dflash_core.training.batch_plan import BatchPlan, cut, mix
from dflash_core.training.blocks import accepted_drafts, drafter_loss
from dflash_core.training.chain import walk
from dflash_core.training.documents import Documents
from dflash_core.training.held_out import HeldOutAcceptance
from dflash_core.training.losses import needs_target
from dflash_core.training.objective import Objective
from dflash_core.training.optimizers import Optimizers
from dflash_core.training.schedules import Schedule
from dflash_core.training.trainable import merge, prepare, trainable

_MOST_SKIPPED = 5
"""Steps in a row whose gradient may be NaN or infinite before training gives up."""

_GAIN = 0.002
"""What counts as progress of the held-out metric, as a fraction of it."""


@dataclass(frozen=True)
class TrainOptions:
    """How to train. Lengths are in tokens."""

    schedule: Schedule
    batch_tokens: int
    """Context tokens per optimizer step, over all workers."""
    anchors_per_sequence: int
    objective: Objective
    learning_rate: float
    clip_norm: float
    weight_decay: float
    seed: int
    micro_tokens: int | None = None
    """Context tokens of one forward and backward; None: all of a step at once."""
    anchors: Literal["uniform", "chain"] = "uniform"
    """Drawn evenly from the answers, or from the chain that the drafter's own decoding walks."""
    chain_epochs: int = 4
    """Passes over the documents until their chains are walked anew."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    mode: Literal["full", "lora", "private"] = "full"
    lora_rank: int = 16
    patience: int | None = None
    """Measurements in a row without progress after which training ends early; None: never."""


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, over all workers."""

    step: int
    loss: float
    proxy_tau: float
    """1 + mean accepted drafts of teacher-forced blocks (`objective.BlockLoss.chain`)."""
    num_tokens: int
    num_anchors: int
    learning_rate: float
    gradient_norm: float
    skipped: int
    """1 if the gradient was not finite and the step was left out."""


class Reducer:
    """How workers agree on sums; the default is a single worker."""

    rank = 0
    world_size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the workers (in place where it can)."""
        return tensor


class Trainer:
    """A drafter in training: `step()` until `done`, then `finish()`; `state()` and `load()` resume it."""

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: Tensor,
        rows: FeatureSet,
        options: TrainOptions,
        reducer: Reducer | None = None,
    ) -> None:
        """`embedding` and `head` [vocab, hidden] are the target's, frozen; `rows` are the corpus."""
        if rows.longest_span() < 2:
            raise UserError(
                "no sample has a response of two tokens or more, so there is nothing to train on; "
                "raise --generate.max-new-tokens or use other prompts"
            )
        self.drafter = drafter.train()
        prepare(drafter, options.mode, lora_rank=options.lora_rank, seed=options.seed)
        self.embedding, self.head = embedding, head
        self.rows, self.options = rows, options
        self.reducer = reducer or Reducer()
        self.mixed_precision = embedding.is_cuda
        """Master weights stay float32; matrix products run in bfloat16."""
        self.lengths = rows.lengths()
        trained, self.held_out = held_out.split(rows, options.seed)
        self.plan = BatchPlan(
            self.lengths, batch_tokens=options.batch_tokens, seed=options.seed, documents=trained
        )
        self.optimizer = Optimizers(
            trainable(drafter),
            options.optimizer,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
        )
        self.step_index = 0
        self._skipped = 0
        self._chains: dict[int, Tensor] = {}
        self._best: dict[str, Any] | None = None
        self._stale = 0
        self._converged_at: int | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._next: tuple[int, Future[list[Documents]]] | None = None

    @property
    def done(self) -> bool:
        return self.step_index >= self.options.schedule.last_step(self._converged_at)

    @property
    def best_tau(self) -> float | None:
        """The best held-out τ so far."""
        return None if self._best is None else self._best["tau"]

    def run(self, report: Callable[[StepReport], None]) -> None:
        """Step until done, reporting each."""
        while not self.done:
            report(self.step())

    def step(self) -> StepReport:
        """One optimizer step over this step's documents (this worker's share of them)."""
        rate = self.options.learning_rate * self.options.schedule.factor(self.step_index, self._converged_at)
        self.optimizer.set_rate(rate)
        sums = self._backward()
        loss, weight, chain, blocks, tokens = self.reducer.sum(sums.to(self.embedding.device)).tolist()
        norm = self._apply(weight) if weight else 0.0
        skipped = not math.isfinite(norm)
        self._skipped = self._skipped + 1 if skipped else 0
        if self._skipped >= _MOST_SKIPPED:
            raise UserError(
                f"the gradient was {norm} in {self._skipped} steps in a row, up to step {self.step_index}; "
                "lower --train.learning-rate or check the target's features"
            )
        self.step_index += 1
        return StepReport(
            step=self.step_index,
            loss=loss / weight if weight else 0.0,
            proxy_tau=1 + chain / blocks if blocks else 1.0,
            num_tokens=int(tokens),
            num_anchors=int(blocks),
            learning_rate=rate,
            gradient_norm=norm,
            skipped=int(skipped),
        )

    def measure(self) -> HeldOutAcceptance | None:
        """Acceptance on the held-out samples, over all workers; None where none are held out.

        Keeps the best weights, and ends training when `patience` measurements brought no progress.
        """
        share = self.held_out[self.reducer.rank :: self.reducer.world_size]
        with self._autocast():
            sums = held_out.held_out_sums(
                self.drafter, self.embedding, self.head, (self.rows[i] for i in share)
            )
        total = self.reducer.sum(torch.tensor(sums, dtype=torch.float64, device=self.embedding.device))
        found = held_out.acceptance(total.tolist())
        if found is not None:
            self._judge(found.tau)
        return found

    def _judge(self, tau: float) -> None:
        best = self.best_tau
        self._stale = 0 if best is None or tau > best * (1 + _GAIN) else self._stale + 1
        if best is None or tau >= best:
            weights = {k: v.detach().cpu().clone() for k, v in self.drafter.state_dict().items()}
            self._best = {"tau": tau, "step": self.step_index, "drafter": weights}
        patience = self.options.patience
        if patience is not None and self._stale >= patience and self._converged_at is None:
            self._converged_at = self.step_index

    def finish(self) -> Drafter:
        """The drafter as it is to be saved: of its best measurement, if there was one."""
        self._loader.shutdown(cancel_futures=True)
        if self._best is not None:
            self.drafter.load_state_dict(self._best["drafter"])
        return merge(self.drafter)

    def _backward(self) -> Tensor:
        """Accumulate gradients of the *summed* loss; returns [loss, weight, chain, blocks, tokens]."""
        for parameter in trainable(self.drafter):
            parameter.grad = None
        sums = torch.zeros(5, dtype=torch.float64)
        for documents in self._documents():
            with self._autocast():
                result = drafter_loss(
                    self.drafter, self.embedding, self.head, self.options.objective, documents
                )
            result.total.backward()
            loss = float(result.total.detach())
            sums += torch.tensor(
                [loss, result.weight, result.chain, result.blocks, documents.num_tokens], dtype=torch.float64
            )
        return sums

    def _documents(self) -> list[Documents]:
        """This step's share, cut for memory; the next step's is read from disk meanwhile."""
        step = self.step_index
        if self._next is None or self._next[0] != step:
            self._next = step, self._loader.submit(self._load, self._share(step))
        loaded = self._next[1].result()
        self._next = step + 1, self._loader.submit(self._load, self._share(step + 1))
        return loaded if self.options.anchors == "uniform" else [self._on_chain(part) for part in loaded]

    def _share(self, step: int) -> tuple[int, list[int]]:
        chosen = self.plan.batch(step)
        return step, chosen[self.reducer.rank :: self.reducer.world_size]

    def _load(self, share: tuple[int, list[int]]) -> list[Documents]:
        """The share's documents that have an anchor, each with a uniform draw."""
        step, indices = share
        seed = mix(self.options.seed, 2, step)
        parts = []
        for run in cut(indices, self.lengths, self.options.micro_tokens):
            kept, rows, anchors = [], [], []
            for index in run:
                row = self.rows[index]
                # Seeded per document, so that the draw does not depend on how workers share them.
                generator = torch.Generator().manual_seed(mix(seed, index))
                drawn = draw_anchors(row.loss_mask, self.options.anchors_per_sequence, generator)
                if drawn.numel():
                    kept.append(index)
                    rows.append(row)
                    anchors.append(drawn)
            if rows:
                last_hidden = needs_target(self.options.objective.loss)
                parts.append(Documents.of(rows, anchors, indices=kept, last_hidden=last_hidden))
        return parts

    def _on_chain(self, documents: Documents) -> Documents:
        """The same documents with anchors where decoding with this drafter begins its blocks.

        After Draft-OPD (arXiv 2605.29343). Chains are walked anew when `chain_epochs` have passed.
        """
        fresh = self.plan.epoch(self.step_index) % self.options.chain_epochs == 0
        if fresh or any(index not in self._chains for index in documents.indices):
            self._walk(documents)
        most, seed = self.options.anchors_per_sequence, mix(self.options.seed, 2, self.step_index)
        anchors = []
        for index in documents.indices:
            chain = self._chains[index].long()
            generator = torch.Generator().manual_seed(mix(seed, index))
            anchors.append(chain[torch.randperm(len(chain), generator=generator)[:most].sort().values])
        return replace(documents, anchors=anchors)

    def _walk(self, documents: Documents) -> None:
        every = [possible_anchors(mask) for mask in documents.loss_masks]
        with self._autocast():
            accepted, _ = accepted_drafts(
                self.drafter, self.embedding, self.head, replace(documents, anchors=every)
            )
        counts = accepted.cpu().split([len(anchors) for anchors in every])
        for index, mask, count in zip(documents.indices, documents.loss_masks, counts, strict=True):
            self._chains[index] = walk(mask, count).anchors.int()

    def _autocast(self) -> Any:
        return torch.autocast(self.embedding.device.type, torch.bfloat16, enabled=self.mixed_precision)

    def _apply(self, weight: float) -> float:
        """Average the gradients over all workers' labeled weight, clip, and take the step if it is finite."""
        parameters = trainable(self.drafter)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self.reducer.sum(parameter.grad).div_(weight)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.options.clip_norm))
        if math.isfinite(norm):
            self.optimizer.step()
        return norm

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, as tensors and plain values."""
        return {
            "step": self.step_index,
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "skipped": self._skipped,
            "chains": self._chains,
            "best": self._best,
            "stale": self._stale,
            "converged_at": self._converged_at,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.step_index = int(state["step"])
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._skipped, self._chains = state["skipped"], state["chains"]
        self._best, self._stale, self._converged_at = state["best"], state["stale"], state["converged_at"]
