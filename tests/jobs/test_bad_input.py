"""Bad input: exit 2, one sentence with the remedy, nothing registered, no partial artifact."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jobs import evaluate, realign
from pipelines.cli import run_job
from tests.jobs.conftest import Home, last_json

Damage = Callable[[Home], list[str]]
"""Spoils the home and returns the flags to add."""


def _rewrite(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Edit a JSON file that other homes share by hard link."""
    data = json.loads(path.read_text())
    change(data)
    path.unlink()
    path.write_text(json.dumps(data))


def _missing(home: Home) -> list[str]:
    shutil.rmtree(home.target)
    return []


def _file(home: Home) -> list[str]:
    shutil.rmtree(home.target)
    home.target.write_text("not a directory")
    return []


def _missing_shard(home: Home) -> list[str]:
    weights = home.target / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    index = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    index["model.norm.weight"] = "model-00002-of-00002.safetensors"
    del tensors["model.norm.weight"]
    save_file(tensors, home.target / "model-00001-of-00002.safetensors")
    (home.target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return []


def _truncated(home: Home) -> list[str]:
    weights = home.target / "model.safetensors"
    data = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(data[:-100])
    return []


def _nan(home: Home) -> list[str]:
    weights = home.target / "model.safetensors"
    tensors = load_file(weights)
    weights.unlink()
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, weights)
    return []


def _pickle_only(home: Home) -> list[str]:
    (home.target / "model.safetensors").rename(home.target / "pytorch_model.bin")
    return []


def _remote_code(home: Home) -> list[str]:
    _rewrite(home.target / "config.json", lambda c: c.update(auto_map={"AutoModel": "evil.Model"}))
    return []


def _architecture(home: Home) -> list[str]:
    _rewrite(home.target / "config.json", lambda c: c.update(architectures=["MambaForCausalLM"]))
    return []


def _no_tokenizer(home: Home) -> list[str]:
    for path in home.target.glob("tokenizer*"):
        path.unlink()
    return []


def _no_template(home: Home) -> list[str]:
    for path in home.target.glob("chat_template*"):
        path.unlink()
    if "chat_template" in json.loads((home.target / "tokenizer_config.json").read_text()):
        _rewrite(home.target / "tokenizer_config.json", lambda c: c.pop("chat_template"))
    return []


def _vocabulary(home: Home) -> list[str]:
    def grow(data: dict[str, object]) -> None:
        added = data["added_tokens"]
        assert isinstance(added, list)
        added.append({**added[0], "id": 5000, "content": "<|beyond|>"})

    _rewrite(home.target / "tokenizer.json", grow)
    return []


def _empty_prompts(home: Home) -> list[str]:
    (home.folder / "train.jsonl").write_text("")
    return []


def _not_json(home: Home) -> list[str]:
    lines = (home.folder / "train.jsonl").read_text().splitlines()
    lines[2] = "{broken"
    (home.folder / "train.jsonl").write_text("\n".join(lines))
    return []


def _no_turns(home: Home) -> list[str]:
    (home.folder / "gate.jsonl").write_text('{"id": "a", "domain": "x", "question": "why?"}\n')
    return []


def _too_long(home: Home) -> list[str]:
    row = {"id": "endless", "domain": "x", "turns": ["many words " * 4000]}
    with (home.folder / "gate.jsonl").open("a") as gate:
        gate.write(json.dumps(row) + "\n")
    return []


def _tools(home: Home) -> list[str]:
    row = {"id": "agent", "prompt": "add", "tools": [{"type": "function", "function": {"name": "add"}}]}
    with (home.folder / "gate.jsonl").open("a") as gate:
        gate.write(json.dumps(row) + "\n")
    return []


def _silent_server(home: Home) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ["--tracking-uri", f"http://127.0.0.1:{port}"]


def _few_gate_prompts(home: Home) -> list[str]:
    lines = (home.folder / "gate.jsonl").read_text().splitlines(keepends=True)
    (home.folder / "gate.jsonl").write_text("".join(lines[:3]))
    return []


def _store_is_a_file(home: Home) -> list[str]:
    (home.folder / "occupied").write_text("")
    return ["--store", str(home.folder / "occupied")]


def _unknown_key(home: Home) -> list[str]:
    (home.folder / "realign.toml").write_text("[train]\nlearning_rat = 0.1\n")
    return ["--config", str(home.folder / "realign.toml")]


CASES: dict[str, tuple[Damage, list[str]]] = {
    "missing directory": (_missing, ["target"]),
    "a file instead of a directory": (_file, ["target", "director"]),
    "an index that names a missing shard": (_missing_shard, ["model-00002-of-00002.safetensors"]),
    "a truncated file": (_truncated, ["model.safetensors"]),
    "NaN weights": (_nan, ["model.norm.weight"]),
    "pickled weights only": (_pickle_only, ["safetensors"]),
    "remote code": (_remote_code, ["auto_map"]),
    "an unsupported architecture": (_architecture, ["MambaForCausalLM"]),
    "no tokenizer": (_no_tokenizer, ["tokenizer"]),
    "no chat template": (_no_template, ["--chat-template"]),
    "a vocabulary larger than the embedding": (_vocabulary, ["tokenizer", "1024 rows"]),
    "an empty prompt file": (_empty_prompts, ["train.jsonl"]),
    "a line that is not JSON": (_not_json, ["train.jsonl", "line 3"]),
    "a prompt without turns": (_no_turns, ["gate.jsonl", "turns"]),
    "too few gate prompts": (_few_gate_prompts, ["3 gate prompts", "--eval-prompts", "8"]),
    "a prompt longer than the context": (_too_long, ["endless", "1024"]),
    "tools that the template does not show": (_tools, ["prompt 'agent' has tools", "--chat-template"]),
    "a chat template that is not there": (
        lambda h: ["--chat-template", "no.jinja"],
        ["there is no file no.jinja to be the --chat-template; check the path"],
    ),
    "layer ids out of range": (lambda h: ["--drafter.target-layer-ids", "0,7"], ["[0, 7]", "0..0"]),
    "a mask token that means something": (lambda h: ["--mask-token-id", "0"], ["--mask-token-id"]),
    "a threshold beyond the block": (lambda h: ["--gate.min-tau", "9"], ["--gate.min-tau", "block"]),
    "sampling at the gate": (lambda h: ["--evaluate.temperature", "0.7"], ["--evaluate.temperature"]),
    "a silent tracking server": (_silent_server, ["127.0.0.1"]),
    "a file store": (lambda h: ["--tracking-uri", "./mlruns"], ["sqlite:///"]),
    "a store that is a file": (_store_is_a_file, ["occupied"]),
    "a store of unknown protocol": (lambda h: ["--store", "nosuch://bucket/x"], ["nosuch"]),
    "an unknown configuration key": (_unknown_key, ["learning_rat", "did you mean", "learning_rate"]),
    "an unknown flag": (lambda h: ["--trian.steps", "5"], ["--trian.steps", "did you mean"]),
    "a value out of bounds": (lambda h: ["--train.steps", "0"], ["steps"]),
}


@pytest.mark.parametrize(("damage", "words"), CASES.values(), ids=CASES.keys())
def test_bad_input_is_one_sentence_and_leaves_nothing(
    damage: Damage,
    words: list[str],
    make_home: Callable[[str], Home],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = make_home("bad")
    arguments = home.arguments("target", *damage(home))
    monkeypatch.chdir(home.folder)
    with pytest.raises(SystemExit) as ended:
        run_job(realign.main, arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (message,) = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in captured.err
    for word in words:
        assert word in message
    assert not (home.folder / "dflash-mlflow.db").exists()
    left = [p for p in home.folder.glob("dflash-store/**/*") if p.is_file() and p.parent.name != "leases"]
    # What was drawn before the target was asked is whole, and the same for any other target.
    assert [
        p for p in left if not (p.parent.parent.name == "prompts" and (p.parent / "_SUCCESS").exists())
    ] == []


def test_a_read_only_store_is_refused(
    make_home: Callable[[str], Home], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = make_home("bad")
    monkeypatch.chdir(home.folder)
    mount = home.folder / "readonly"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(mount)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    try:
        with pytest.raises(SystemExit) as ended:
            run_job(realign.main, home.arguments(home.target, "--store", str(mount / "store")))
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert ended.value.code == 2
    assert "readonly" in capsys.readouterr().err


def test_a_process_ends_with_the_code_and_without_a_traceback(make_home: Callable[[str], Home]) -> None:
    home = make_home("bad")
    done = home.run("realign.py", home.arguments("nowhere", "--json"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_evaluate_measures_the_registered_drafter(aligned: tuple[Home, dict[str, object]]) -> None:
    """The same prompts, decoded outside Ray: the same τ as the gate measured."""
    home, result = aligned
    (drafter,) = home.folder.glob("dflash-store/train/*/drafter")
    common = ["--target", "target", "--drafter", str(drafter), "--prompts", "gate.jsonl", "--threads", "1"]
    done = home.run("evaluate.py", [*common, "--max-new-tokens", "24", "--json"])
    assert done.returncode == 0, done.stderr
    measured = last_json(done.stdout)
    assert {"tau", "tokens", "rounds", "acceptance_by_position", "lossless", "prompts", "by_domain"} <= set(
        measured
    )
    assert measured["lossless"] is True
    assert measured["tau"] == measured["tokens"] / measured["rounds"]
    assert measured["tau"] == result["tau"]["candidate"]  # type: ignore[index]
    table = home.run("evaluate.py", [*common, "--max-new-tokens", "8"])
    assert table.returncode == 0
    assert "arithmetic" in table.stdout


def test_evaluate_refuses_tools_that_the_template_does_not_show(
    aligned: tuple[Home, dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, _ = aligned
    (drafter,) = home.folder.glob("dflash-store/train/*/drafter")
    _tools(Home(tmp_path))
    monkeypatch.chdir(home.folder)
    flags = ["--target", "target", "--drafter", str(drafter), "--prompts", str(tmp_path / "gate.jsonl")]
    with pytest.raises(SystemExit) as ended:
        run_job(evaluate.main, flags)
    assert ended.value.code == 2
    assert "prompt 'agent' has tools" in capsys.readouterr().err


def _narrow(home: Home, drafter: Path) -> None:
    _rewrite(drafter / "config.json", lambda c: c.update(hidden_size=32))


def _no_config(home: Home, drafter: Path) -> None:
    (drafter / "config.json").unlink()


def _half_weights(home: Home, drafter: Path) -> None:
    data = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(data[:1000])


def _unknown_weight(home: Home, drafter: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    save_file({**tensors, "extra.weight": np.zeros(3, np.float32)}, drafter / "model.safetensors")


def _bad_layers(home: Home, drafter: Path) -> None:
    _rewrite(drafter / "config.json", lambda c: c["dflash_config"].update(target_layer_ids=[5]))  # type: ignore[index]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_narrow, "hidden"),
        (_no_config, "config.json"),
        (_half_weights, "model.safetensors"),
        (_unknown_weight, "extra.weight"),
        (_bad_layers, "out of range"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    spoil: Callable[[Home, Path], None],
    word: str,
    aligned: tuple[Home, dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home, _ = aligned
    (good,) = home.folder.glob("dflash-store/train/*/drafter")
    drafter = tmp_path / "drafter"
    shutil.copytree(good, drafter)
    spoil(home, drafter)
    monkeypatch.chdir(home.folder)
    with pytest.raises(SystemExit) as ended:
        run_job(evaluate.main, ["--target", "target", "--drafter", str(drafter), "--prompts", "gate.jsonl"])
    assert ended.value.code == 2
    assert word in capsys.readouterr().err
