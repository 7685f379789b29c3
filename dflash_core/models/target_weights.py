"""Single tensors of a target, read straight from its safetensors: what training needs of it.

Training shares the target's embedding and head and may start from some of its layers; it never
needs the rest, which for a large target would not fit beside the optimizer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_core.errors import UserError

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


class TargetWeights:
    """Read access to a validated target directory, tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _tensor_files(path)

    def embedding(self) -> Tensor:
        """[vocab, hidden]."""
        return self._only("embed_tokens.weight")

    def head(self) -> Tensor:
        """[vocab, hidden]; the embedding itself where the two are tied."""
        return self.embedding() if self.tied else self._only("lm_head.weight")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return not any(name.endswith("lm_head.weight") for name in self._files)

    def layer(self, index: int) -> dict[str, Tensor]:
        """Decoder layer `index`: parameter name inside the layer -> tensor."""
        found = {}
        for name in self._files:
            match = _LAYER.search(name)
            if match and int(match[1]) == index:
                found[match[2]] = self._read(name)
        return found

    def _only(self, suffix: str) -> Tensor:
        names = [name for name in self._files if name.endswith(suffix)]
        if len(names) != 1:
            raise UserError(f"{self.path}: {len(names)} weights end in {suffix!r}, expected one")
        return self._read(names[0])

    def _read(self, name: str) -> Tensor:
        with safe_open(self.path / self._files[name], framework="pt") as reader:
            tensor: Tensor = reader.get_tensor(name)
        return tensor


def _tensor_files(path: Path) -> dict[str, str]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return weight_map
    with safe_open(path / "model.safetensors", framework="pt") as reader:
        return dict.fromkeys(reader.keys(), "model.safetensors")


@torch.no_grad()
def frozen_pair(path: Path, *, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's (embedding, head) on a device; one tensor, not two, where they are tied."""
    weights = TargetWeights(path)
    embedding = weights.embedding().to(device=device, dtype=dtype)
    if weights.tied:
        return embedding, embedding
    return embedding, weights.head().to(device=device, dtype=dtype)
