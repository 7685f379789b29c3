"""Training throughput against z-lab's model class with a dense mask: same shapes, weights, data and steps.

    python benchmarks/train_throughput.py [--out benchmarks/results/train_throughput.json]

Both sides run forward, loss, backward and AdamW on one thread, in turns, in one process. The reference is
`dflash.model.DFlashDraftModel` with one dense additive mask over context and blocks, and
`cross_entropy` over all logits. That both compute the same loss is checked before anything is timed.
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
from dflash.model import DFlashDraftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3Config

from dflash_core.models.attention import dense_mask
from dflash_core.models.drafter import Drafter
from dflash_core.models.drafter_config import DrafterConfig
from dflash_core.training.anchors import IGNORED, draw_anchors, pack_anchors
from dflash_core.training.blocks import drafter_loss
from dflash_core.training.documents import Documents
from dflash_core.training.objective import Objective
from dflash_core.training.slot_weights import decay_weights

SHAPES = {
    # The demo's drafter and step.
    "demo": {
        "hidden": 128,
        "layers": 2,
        "vocab": 1024,
        "block": 8,
        "context": 100,
        "documents": 10,
        "anchors": 16,
    },
    "long": {
        "hidden": 256,
        "layers": 2,
        "vocab": 4096,
        "block": 16,
        "context": 1024,
        "documents": 1,
        "anchors": 64,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pairs", type=int, default=7, help="timed pairs of steps per shape")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: compare(shape, options.pairs) for name, shape in SHAPES.items()}
    result = {
        "command": "python benchmarks/train_throughput.py",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": 1,
        },
        "shapes": SHAPES,
        "results": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


def compare(shape: dict[str, int], pairs: int) -> dict[str, float]:
    """Seconds per step of either side and the median of their paired ratio (above 1: ours is faster)."""
    torch.manual_seed(0)
    config = _config(shape)
    ours = Drafter(config)
    theirs = DFlashDraftModel(Qwen3Config(**config.to_json()))
    theirs.load_state_dict(ours.state_dict())
    data = _data(shape, config)
    our_step, their_step = _our_step(ours, data), _their_step(theirs, data, shape)
    first, second = our_step(), their_step()
    if abs(first - second) > 1e-4 * abs(second):
        raise SystemExit(f"the two sides disagree: loss {first} against {second}")
    mine, other = [], []
    for _ in range(pairs):
        for step, times in ((our_step, mine), (their_step, other)):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(mine, other, strict=True)]
    return {
        "our_seconds": statistics.median(mine),
        "reference_seconds": statistics.median(other),
        "speedup": statistics.median(ratios),
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
    }


def _config(shape: dict[str, int]) -> DrafterConfig:
    return DrafterConfig(
        block_size=shape["block"],
        mask_token_id=shape["vocab"] - 1,
        target_layer_ids=(1, 2, 3, 4, 5),
        num_target_layers=8,
        hidden_size=shape["hidden"],
        num_layers=shape["layers"],
        num_heads=4,
        num_kv_heads=2,
        head_dim=shape["hidden"] // 4,
        intermediate_size=3 * shape["hidden"],
        vocab_size=shape["vocab"],
        max_positions=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=("full_attention",) * shape["layers"],
    )


class _Data:
    """One step's data: documents, anchors, features, and the frozen embedding and head."""

    def __init__(self, shape: dict[str, int], config: DrafterConfig) -> None:
        generator = torch.Generator().manual_seed(1)
        count, length = shape["documents"], shape["context"]
        self.config = config
        self.documents = [
            torch.randint(0, shape["vocab"] - 1, (length,), generator=generator) for _ in range(count)
        ]
        self.masks = [torch.arange(length) >= length // 4] * count
        self.anchors = [draw_anchors(mask, shape["anchors"], generator) for mask in self.masks]
        self.features = torch.randn(count * length, 5 * shape["hidden"], generator=generator)
        self.head = torch.randn(shape["vocab"], shape["hidden"], generator=generator) * 0.05
        self.objective = Objective(gamma=4.0)
        self.weights = decay_weights(shape["block"], 4.0)


def _data(shape: dict[str, int], config: DrafterConfig) -> _Data:
    return _Data(shape, config)


def _our_step(model: Drafter, data: _Data) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        documents = Documents(data.documents, data.masks, data.anchors, data.features)
        result = drafter_loss(model, data.head, data.head, data.objective, documents)
        (result.total / result.weight).backward()
        optimizer.step()
        return result.total.item() / result.weight

    return step


def _their_step(model: DFlashDraftModel, data: _Data, shape: dict[str, int]) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    size = shape["block"]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        batch = pack_anchors(data.documents, data.masks, data.anchors, size)
        ids = torch.full((batch.layout.num_anchors, size), data.config.mask_token_id)
        ids[:, 0] = batch.anchor_ids
        seen = dense_mask(batch.layout, causal=False, window=None)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[None, None]
        context = torch.cat([torch.arange(len(d)) for d in data.documents])
        blocks = (batch.layout.positions[:, None] + torch.arange(size)).flatten()
        hidden: Tensor = model(
            target_hidden=data.features[None],
            noise_embedding=F.embedding(ids.flatten(), data.head)[None],
            position_ids=torch.cat([context, blocks])[None],
            attention_mask=mask,
        )
        logits = F.linear(hidden.view(-1, size, shape["hidden"])[:, 1:], data.head)
        each = F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="none"
        ).view_as(batch.labels)
        loss = (each * data.weights).sum() / (data.weights * (batch.labels != IGNORED)).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
