"""How Ray Train's workers agree on sums: torch.distributed when there are several."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from dflash_core.training.trainer import Reducer


class RayReducer(Reducer):
    """Sums over the process group that Ray Train set up; a lone worker has nobody to ask."""

    def __init__(self) -> None:
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if self._distributed else 0
        self.world_size = dist.get_world_size() if self._distributed else 1

    def sum(self, tensor: Tensor) -> Tensor:
        if self._distributed:
            dist.all_reduce(tensor)
        return tensor
