"""The training loop: deterministic batches, the step, checkpoints that resume exactly.

Which documents and anchors a step sees is a function of (seed, step) alone, so a run that was killed
and resumed walks the same path as one that was not. Knows nothing of Ray: `reduce` is how several
workers agree, `report` is how progress leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.anchors import AnchorBatch, draw_anchors, pack_anchors
from dflash_core.documents import Documents
from dflash_core.drafter import Drafter
from dflash_core.errors import UserError
from dflash_core.features import FeatureSet
from dflash_core.losses import needs_target
from dflash_core.objective import BlockLoss, Objective, block_loss


@dataclass(frozen=True)
class TrainOptions:
    """How to train. Lengths are in tokens."""

    steps: int
    batch_tokens: int
    """Context tokens per optimizer step, over all workers."""
    anchors_per_sequence: int
    objective: Objective
    learning_rate: float
    warmup_fraction: float
    clip_norm: float
    weight_decay: float
    seed: int


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


class Reducer:
    """How workers agree on sums; the default is a single worker."""

    rank = 0
    world_size = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over the workers (in place where it can)."""
        return tensor


def learning_rate(step: int, options: TrainOptions) -> float:
    """Linear warm-up over `warmup_fraction` of the steps, then a cosine to zero."""
    warmup = max(1, round(options.warmup_fraction * options.steps))
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


class BatchPlan:
    """Which documents each step trains on: epochs of shuffled documents cut by a token budget.

    `lengths` [documents] is all that it holds of the data.
    """

    def __init__(self, lengths: Sequence[int], options: TrainOptions) -> None:
        self.lengths, self.options = lengths, options
        self._epochs: dict[int, list[list[int]]] = {}
        self._first_steps = [0]

    def batch(self, step: int) -> list[int]:
        """Document indices of `step`."""
        epoch = 0
        while True:
            while len(self._first_steps) <= epoch + 1:
                self._first_steps.append(self._first_steps[-1] + len(self._epoch(len(self._first_steps) - 1)))
            if step < self._first_steps[epoch + 1]:
                return self._epoch(epoch)[step - self._first_steps[epoch]]
            epoch += 1

    def _epoch(self, epoch: int) -> list[list[int]]:
        if epoch not in self._epochs:
            generator = torch.Generator().manual_seed(_mix(self.options.seed, 1, epoch))
            order = torch.randperm(len(self.lengths), generator=generator).tolist()
            batches: list[list[int]] = [[]]
            tokens = 0
            for index in order:
                if batches[-1] and tokens + self.lengths[index] > self.options.batch_tokens:
                    batches.append([])
                    tokens = 0
                batches[-1].append(index)
                tokens += self.lengths[index]
            self._epochs = {epoch: batches}
        return self._epochs[epoch]


def _mix(*parts: int) -> int:
    """One 63-bit seed out of several small integers (an FNV-1a walk)."""
    state = 0xCBF29CE484222325
    for part in parts:
        state = ((state ^ part) * 0x100000001B3) % (1 << 63)
    return state


class Trainer:
    """A drafter in training: `step()` until `done`; `state()` and `load()` make it resumable."""

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
        self.drafter = drafter.train().requires_grad_(True)
        self.embedding, self.head = embedding, head
        self.rows, self.options = rows, options
        self.reducer = reducer or Reducer()
        self.step_index = 0
        self.mixed_precision = embedding.is_cuda
        """Master weights stay float32; matrix products run in bfloat16."""
        if rows.longest_span() < 2:
            raise UserError(
                "no sample has a response of two tokens or more, so there is nothing to train on; "
                "raise --generate.max-new-tokens or use other prompts"
            )
        self.plan = BatchPlan(rows.lengths(), options)
        self.optimizer = torch.optim.AdamW(
            self._parameter_groups(), lr=options.learning_rate, betas=(0.9, 0.95)
        )

    def _parameter_groups(self) -> list[dict[str, Any]]:
        matrices = [p for p in self.drafter.parameters() if p.dim() >= 2]
        vectors = [p for p in self.drafter.parameters() if p.dim() < 2]
        return [
            {"params": matrices, "weight_decay": self.options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    @property
    def done(self) -> bool:
        return self.step_index >= self.options.steps

    def run(self, report: Callable[[StepReport], None]) -> None:
        """Step until done, reporting each."""
        while not self.done:
            report(self.step())

    def step(self) -> StepReport:
        """One optimizer step over this step's documents (this worker's share of them)."""
        options = self.options
        rate = learning_rate(self.step_index, options)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        chosen = self.plan.batch(self.step_index)
        share = chosen[self.reducer.rank :: self.reducer.world_size]
        sums = self._backward(share, anchor_seed=_mix(options.seed, 2, self.step_index))
        loss, weight, chain, blocks, tokens = self.reducer.sum(sums.to(self.embedding.device)).tolist()
        norm = self._apply(weight) if weight else 0.0
        self.step_index += 1
        return StepReport(
            step=self.step_index,
            loss=loss / weight if weight else 0.0,
            proxy_tau=1 + chain / blocks if blocks else 1.0,
            num_tokens=int(tokens),
            num_anchors=int(blocks),
            learning_rate=rate,
            gradient_norm=norm,
        )

    def _backward(self, share: list[int], anchor_seed: int) -> Tensor:
        """Accumulate gradients of the *summed* loss; returns [loss, weight, chain, blocks, tokens]."""
        self.optimizer.zero_grad(set_to_none=True)
        documents = self._documents(share, anchor_seed)
        if not documents.ids:
            return torch.zeros(5, dtype=torch.float64)
        with torch.autocast(self.embedding.device.type, torch.bfloat16, enabled=self.mixed_precision):
            result = drafter_loss(self.drafter, self.embedding, self.head, self.options.objective, documents)
        result.total.backward()
        loss = float(result.total.detach())
        return torch.tensor(
            [loss, result.weight, result.chain, result.blocks, documents.num_tokens], dtype=torch.float64
        )

    def _documents(self, share: list[int], anchor_seed: int) -> Documents:
        """The share's documents that have an anchor, each with its draw."""
        rows, anchors = [], []
        for index in share:
            row = self.rows[index]
            # Seeded per document, so that the draw does not depend on how workers share them.
            generator = torch.Generator().manual_seed(_mix(anchor_seed, index))
            drawn = draw_anchors(row.loss_mask, self.options.anchors_per_sequence, generator)
            if drawn.numel():
                rows.append(row)
                anchors.append(drawn)
        return Documents.of(rows, anchors, last_hidden=needs_target(self.options.objective.loss))

    def _apply(self, weight: float) -> float:
        """Average the gradients over all workers' labeled weight, clip, and take the step."""
        parameters = list(self.drafter.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self.reducer.sum(parameter.grad).div_(weight)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.clip_norm)
        if not torch.isfinite(norm):
            raise UserError(
                f"the gradient became {float(norm)} at step {self.step_index}; "
                "lower --train.learning-rate or check the target's features"
            )
        self.optimizer.step()
        return float(norm)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, as tensors and plain values."""
        return {
            "step": self.step_index,
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.step_index = int(state["step"])
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])


def drafter_loss(
    drafter: Drafter, embedding: Tensor, head: Tensor, objective: Objective, documents: Documents
) -> BlockLoss:
    """The loss of packed documents at their anchors; embedding and head [vocab, hidden] are the target's."""
    hidden, batch = draft_blocks(drafter, embedding, documents)
    teacher = None
    if documents.last_hidden is not None:
        teacher = documents.last_hidden.to(head.device)[batch.teachers].to(head.dtype)
    return block_loss(hidden.to(head.dtype), head, batch.labels, objective, teacher)


def draft_blocks(drafter: Drafter, embedding: Tensor, documents: Documents) -> tuple[Tensor, AnchorBatch]:
    """The drafter's hidden states [anchors, block, hidden] of packed documents, and what they should say."""
    device, size = embedding.device, drafter.config.block_size
    ids, masks, anchors = (
        [t.to(device) for t in part] for part in (documents.ids, documents.loss_masks, documents.anchors)
    )
    batch = pack_anchors(ids, masks, anchors, size)
    positions = torch.cat([torch.arange(len(d), device=device) for d in ids])
    slots = torch.full((batch.layout.num_anchors, size), drafter.config.mask_token_id, device=device)
    slots[:, 0] = batch.anchor_ids
    dtype = drafter.norm.weight.dtype
    block = F.embedding(slots.flatten(), embedding).to(dtype)
    features = documents.features.to(device=device, dtype=dtype)
    hidden = drafter.train_blocks(block, features, positions, batch.layout)
    return hidden.view(-1, size, hidden.shape[-1]), batch
