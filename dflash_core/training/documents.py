"""The documents of one training step, with the anchors drawn in each and the target's features of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_core.features.feature_shards import FeatureRow


@dataclass(frozen=True)
class Documents:
    """Documents laid end to end where tensors are packed."""

    ids: list[Tensor]
    """int64 [tokens] each."""
    loss_masks: list[Tensor]
    """bool [tokens] each: where the target itself spoke."""
    anchors: list[Tensor]
    """int64 [anchors] each: sorted positions in the document."""
    features: Tensor
    """[all tokens, taps x hidden]."""
    indices: Sequence[int] = ()
    """Which rows of the corpus they are, where that matters."""
    last_hidden: Tensor | None = None
    """[all tokens, hidden] after the target's final norm, for losses that want its distribution."""

    @classmethod
    def of(
        cls,
        rows: Sequence[FeatureRow],
        anchors: list[Tensor],
        *,
        indices: Sequence[int] = (),
        last_hidden: bool = False,
    ) -> Documents:
        """Rows of shards at the given anchors. last_hidden: bring the target's last hidden states along."""
        return cls(
            ids=[row.input_ids.long() for row in rows],
            loss_masks=[row.loss_mask for row in rows],
            anchors=anchors,
            indices=indices,
            features=torch.cat([row.features for row in rows]),
            last_hidden=torch.cat([_last_hidden(row) for row in rows]) if last_hidden else None,
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.ids)


def _last_hidden(row: FeatureRow) -> Tensor:
    if row.last_hidden is None:
        raise ValueError(f"{row.id} was extracted without the target's last hidden states")
    return row.last_hidden
