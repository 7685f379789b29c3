"""Hidden features of samples: forward passes of the target, each turned into one batch of a shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_writer import FeatureBatch
from dflash_core.features.finite import first_not_finite
from dflash_core.features.token_batches import padded_ids, token_batches
from dflash_core.models.target import Target
from dflash_core.types import Sample


def extract(
    target: Target,
    samples: Iterable[Sample],
    meta: FeatureMeta,
    *,
    batch_tokens: int,
    chunk_tokens: int | None = None,
) -> Iterator[FeatureBatch]:
    """Hidden states of the samples, in the order given, a forward pass at a time.

    Neighbors are batched while rows x longest <= `batch_tokens` (feed them sorted by length); more than
    `chunk_tokens` pass in chunks (`Target.tap`). Raises UserError if a hidden state is not finite.
    """
    for batch in token_batches(samples, batch_tokens):
        yield _forward(target, batch, meta, chunk_tokens)


def _forward(
    target: Target, samples: list[Sample], meta: FeatureMeta, chunk_tokens: int | None
) -> FeatureBatch:
    lengths = [len(s.input_ids) for s in samples]
    taps, hidden, device = len(meta.layer_ids), meta.hidden_size, target.device
    features = torch.empty(sum(lengths), taps, hidden, dtype=torch.bfloat16, device=device)
    last = (
        torch.empty(sum(lengths), hidden, dtype=torch.bfloat16, device=device) if meta.last_hidden else None
    )

    def keep(layer: int, begin: int, states: Tensor) -> None:
        """Round to bfloat16 into place at once, so that no other copy of a layer's output lives on."""
        into = last if layer == target.num_layers else features[:, meta.layer_ids.index(layer)]
        assert into is not None
        start = 0
        for row, length in enumerate(lengths):
            end = min(begin + states.shape[1], length)
            if begin < end:
                into[start + begin : start + end].copy_(states[row, : end - begin])
            start += length

    ids = padded_ids(samples).to(device)
    target.tap(ids, meta.layer_ids, keep, chunk_tokens=chunk_tokens, last_hidden=meta.last_hidden)
    if first_not_finite(features) is not None:
        raise _first_bad_layer(samples, features, meta)
    if last is not None and (where := first_not_finite(last)) is not None:
        raise _not_finite(samples, where[0], "the final norm")
    return FeatureBatch(samples, features.cpu(), None if last is None else last.cpu())


def _first_bad_layer(samples: list[Sample], features: Tensor, meta: FeatureMeta) -> UserError:
    """Names the lowest layer: above it attention has spread what went wrong to other tokens."""
    tap, where = next(
        (tap, where)
        for tap in sorted(range(len(meta.layer_ids)), key=meta.layer_ids.__getitem__)
        if (where := first_not_finite(features[:, tap])) is not None
    )
    return _not_finite(samples, where[0], f"layer {meta.layer_ids[tap]}")


def _not_finite(samples: list[Sample], position: int, layer: str) -> UserError:
    """`position` counts through the samples' tokens."""
    for sample in samples:
        if position < len(sample.input_ids):
            break
        position -= len(sample.input_ids)
    return UserError(
        f"sample {sample.id!r}: the target gives NaN or infinity after {layer} at token {position}; "
        "check the checkpoint, or run it in --dtype float32"
    )
