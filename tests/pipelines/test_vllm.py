"""vLLM answers as the default engine does, in the same actors; run where vLLM is installed (README)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from dflash_core.toy.build import build_tiny_target
from dflash_core.toy.texts import toy_prompts
from pipelines.cluster import ClusterInfo
from tests.pipelines.generated import context_for, generated, sample_files, samples_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its heads are 32 wide, for which vLLM has kernels; its own defaults would change every answer."""
    path = build_tiny_target(tmp_path_factory.mktemp("toy") / "target").path
    defaults = json.loads((path / "generation_config.json").read_text())
    defaults |= {"repetition_penalty": 5.0, "do_sample": True, "temperature": 2.0, "top_k": 3}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def test_greedy_answers_are_those_of_the_default_engine(
    tmp_path: Path, target: Path, local_ray: ClusterInfo
) -> None:
    shards = [toy_prompts(12, seed=0), toy_prompts(6, seed=1)]
    options = {"max_new_tokens": 48, "batch_tokens": 2048}
    ours = generated(context_for(tmp_path / "ours", target, **options), shards)
    theirs = generated(context_for(tmp_path / "theirs", target, engine="vllm", **options), shards)
    assert samples_of(theirs) == samples_of(ours)
    assert [name.split()[0] for name in theirs.artifact.meta["engines"]] == ["vllm"]
    counted = ("samples", "tokens", "stop", "length", "repetitive", "domains")
    assert {key: theirs.artifact.meta[key] for key in counted} == {
        key: ours.artifact.meta[key] for key in counted
    }


def test_sampled_answers_are_the_same_again(tmp_path: Path, target: Path, local_ray: ClusterInfo) -> None:
    shards = [toy_prompts(12, seed=0)]
    options = {"max_new_tokens": 24, "temperature": 1.0, "top_p": 0.9, "engine": "vllm"}
    first, second = (
        generated(context_for(tmp_path / name, target, **options), shards) for name in ("one", "two")
    )
    assert sample_files(first) == sample_files(second)
    assert first.artifact.meta["length"] + first.artifact.meta["stop"] > 0
