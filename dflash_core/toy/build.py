"""Train the toy and save it as a checkpoint like any other; fine-tune it to another style.

The model is an ordinary transformers architecture and the loop a plain one. The directory appears whole
or not at all.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.errors import UserError
from dflash_core.models.transformers_bars import without_bars
from dflash_core.toy.batches import IGNORED, batches
from dflash_core.toy.question import Style
from dflash_core.toy.shape import TINY, ToyShape, new_model
from dflash_core.toy.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

PLAIN_STEPS = 800
"""Enough for the default shape to answer well."""
CHANGED_STEPS = 150
"""Enough to move a trained toy to the other style."""
TINY_STEPS = 120
"""Enough for `TINY` to be a model rather than noise."""

_LEARNING_RATE = 3e-3
_FINE_TUNE_RATE = 2e-3
_WARMUP = 20

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, the step's loss)."""


@dataclass(frozen=True)
class ToyTarget:
    """A toy that was built."""

    path: Path
    steps: int
    loss: float
    """Mean over the last tenth of the steps, in nats per answer token."""


def build_toy_target(
    directory: Path,
    *,
    shape: ToyShape | None = None,
    style: Style = "plain",
    steps: int | None = None,
    seed: int = 0,
    base: Path | None = None,
    threads: int = 2,
    progress: Progress | None = None,
) -> ToyTarget:
    """Train a toy in `style` into `directory`, from nothing or from the toy in `base`.

    The same arguments give the same weights, bit for bit on one machine. Steps default to as many as
    the style needs; with `base`, the shape is the base's. Raises UserError if `directory` exists.
    """
    import torch

    if directory.exists():
        raise UserError(f"{directory} exists already; remove it or build the toy somewhere else")
    if base is not None and shape is not None:
        raise ValueError("the shape comes from the base: give one of the two")
    with _threads(threads), torch.random.fork_rng(devices=[]), _whole_directory(directory) as temporary:
        torch.manual_seed(seed)
        model, tokenizer = _open(base) if base else _new(shape or ToyShape())
        if steps is None:
            steps = PLAIN_STEPS if base is None else CHANGED_STEPS
        rate = _LEARNING_RATE if base is None else _FINE_TUNE_RATE
        loss = _train(model, batches(tokenizer, style, seed), steps, rate, progress)
        _save(model, tokenizer, temporary)
    return ToyTarget(directory, steps, loss)


def build_tiny_target(
    directory: Path, *, shape: ToyShape = TINY, style: Style = "plain", steps: int = TINY_STEPS, seed: int = 0
) -> ToyTarget:
    """The smallest useful toy, on one thread: for tests of the machinery, not of quality."""
    return build_toy_target(directory, shape=shape, style=style, steps=steps, seed=seed, threads=1)


def _new(shape: ToyShape) -> tuple[Any, Any]:
    tokenizer = train_tokenizer(shape.vocab_size, shape.max_positions)
    return new_model(shape, eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id), tokenizer


def _open(base: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with without_bars():
        model = AutoModelForCausalLM.from_pretrained(base, dtype="float32", local_files_only=True)
    return model, AutoTokenizer.from_pretrained(base, local_files_only=True)


def _train(
    model: Any,
    source: Iterator[tuple[Tensor, Tensor]],
    steps: int,
    peak_rate: float,
    progress: Progress | None,
) -> float:
    """AdamW, a short warm-up, a cosine to zero; returns the mean loss of the last tenth."""
    import torch

    model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    losses: list[float] = []
    for step, (ids, labels) in enumerate(islice(source, steps)):
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * _schedule(step, steps)
        loss = _answer_loss(model, ids, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
        if progress is not None:
            progress(step + 1, steps, losses[-1])
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def _schedule(step: int, steps: int) -> float:
    """The learning rate at `step` as a fraction of its peak."""
    warmup = min(_WARMUP, max(1, steps // 10))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _answer_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the answer tokens; the head sees only the rows that predict one."""
    from torch.nn import functional as F

    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = labels[:, 1:] != IGNORED
    return F.cross_entropy(model.lm_head(hidden[:, :-1][wanted]), labels[:, 1:][wanted])


def _save(model: Any, tokenizer: Any, directory: Path) -> None:
    with without_bars():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _whole_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory that becomes `directory` if the block succeeds and vanishes if not."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's is for the owner alone
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
