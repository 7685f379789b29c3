"""A drafter's identity: the sha256 of each file of its directory that engines read."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_core.fingerprint import fingerprint

FILES = ("config.json", "model.safetensors")


def drafter_fingerprint(files: Mapping[str, str]) -> str:
    """`files` maps each name of `FILES` to its sha256."""
    return fingerprint({name: files[name] for name in FILES})
