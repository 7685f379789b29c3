"""From what the user typed to a directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_core.checkpoints.checkpoint import open_checkpoint, resolve_target
from dflash_core.errors import UserError
from tests.dflash_core import tiny_checkpoints as tiny


def _resolve_elsewhere(text: str, home: Path, **environment: str) -> str:
    """`resolve_target` in a process of its own, since the Hub's client reads its settings on import."""
    code = (
        "import sys; from dflash_core.checkpoints.checkpoint import resolve_target\n"
        "from dflash_core.errors import UserError\n"
        "try: print(resolve_target(sys.argv[1]))\n"
        "except UserError as error: print('refused:', error)"
    )
    environment = {**os.environ, "HF_HOME": str(home), **environment}
    command = [sys.executable, "-c", code, text]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_path_is_itself(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_target(str(qwen3)) == qwen3
    monkeypatch.chdir(qwen3.parent)
    assert open_checkpoint(resolve_target("qwen3")).path == qwen3
    monkeypatch.setenv("HOME", str(qwen3.parent))
    assert resolve_target("~/qwen3") == qwen3


@pytest.mark.parametrize(
    "text", ["./no", "/no/such", "~/no", "a/b/c", "no", "a b/c", "", "a/b@", "x\x00y", "é/b"]
)
def test_a_missing_path_is_said_to_be_missing(text: str) -> None:
    with pytest.raises(UserError, match="does not exist: pass an existing directory"):
        resolve_target(text)


@pytest.mark.parametrize("text", ["org/name", "org/name@main"])
def test_a_hub_id_is_found_in_the_cache(originals: dict[str, Path], tmp_path: Path, text: str) -> None:
    snapshot = tiny.hub_cache(originals["qwen3"], tmp_path / "hub")
    assert _resolve_elsewhere(text, tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}]
)
def test_a_hub_id_without_network(tmp_path: Path, environment: dict[str, str]) -> None:
    said = _resolve_elsewhere("org/name@v2", tmp_path, **environment)
    assert re.fullmatch(
        r"refused: org/name@v2 is no directory here .*cannot be reached.*pass its directory", said
    )
