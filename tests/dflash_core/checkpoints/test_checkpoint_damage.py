"""Whatever the bytes, only UserError comes out."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.errors import UserError


def _open_or_refuse(folder: Path) -> bool:
    try:
        open_checkpoint(folder)
    except UserError as error:
        assert str(error)
        return False
    return True


def test_random_damage_to_weights_never_escapes(qwen3: Path) -> None:
    path, chance = qwen3 / "model.safetensors", random.Random(1)
    good = path.read_bytes()
    header_end = 8 + int.from_bytes(good[:8], "little")
    refused = 0
    for round_number in range(300):
        data = bytearray(good)
        if round_number % 3 == 0:
            del data[chance.randrange(len(data)) :]
        else:
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(header_end)] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        refused += not _open_or_refuse(qwen3)
    # A flip inside the ignored metadata is harmless; nearly all others are not.
    assert refused > 280


_JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**70, 0.5, -1e300, "", "x", "\U0001f600"),
    *([], [None], [[]], {}, {"a": {}}, {"type": 3}),
)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    ],
)
def test_random_json_junk_never_escapes(sharded: Path, name: str) -> None:
    path, chance = sharded / name, random.Random(name)
    good = json.loads(path.read_text())
    for _ in range(120):
        content = json.loads(json.dumps(good))
        for _ in range(chance.randint(1, 2)):
            _spoil(content, chance)
        path.write_text(json.dumps(content))
        _open_or_refuse(sharded)


def _spoil(content: dict[str, Any], chance: random.Random) -> None:
    """Replace one value somewhere inside `content` with junk."""
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        deeper = place[key]
        if not isinstance(deeper, (dict, list)) or not deeper or chance.random() < 0.3:
            place[key] = deepcopy(chance.choice(_JUNK))
            return
        place = deeper
