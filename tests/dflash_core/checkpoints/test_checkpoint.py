"""Opening good checkpoints: what is read, what identifies them, and the cache of digests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_core.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from dflash_core.checkpoints.digest_cache import cache_file
from dflash_core.errors import UserError
from tests.dflash_core import tiny_checkpoints as tiny


@pytest.mark.parametrize("name", ["qwen3", "sharded", "qwen2", "llama", "biased"])
def test_reads_what_transformers_reads(originals: dict[str, Path], name: str) -> None:
    import transformers

    checkpoint = open_checkpoint(originals[name])
    model = transformers.AutoModelForCausalLM.from_pretrained(originals[name])
    theirs, ours = model.config, checkpoint.config
    assert ours.model_type == theirs.model_type
    assert ours.architecture == type(model).__name__
    assert ours.hidden_size == theirs.hidden_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == model.model.layers[0].self_attn.head_dim
    assert ours.rope_parameters == theirs.rope_parameters
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert f"torch.{ours.torch_dtype}" == str(model.dtype)
    assert checkpoint.num_parameters == model.num_parameters()


def test_special_ids_come_from_every_file(qwen3: Path) -> None:
    with tiny.editing(qwen3 / "generation_config.json") as generation:
        generation["eos_token_id"] = [tiny.ENDOFTEXT, tiny.IM_END]
    with tiny.editing(qwen3 / "config.json") as config:
        config |= {"bos_token_id": 5, "pad_token_id": -1, "eos_token_id": 7}
    checkpoint = open_checkpoint(qwen3)
    assert checkpoint.eos_ids == (7, tiny.IM_END, tiny.ENDOFTEXT)
    assert (checkpoint.bos_id, checkpoint.pad_id) == (5, tiny.ENDOFTEXT)
    assert checkpoint.num_tokenizer_ids == tiny.ZOOM + 1


def test_needs_neither_torch_nor_transformers(originals: dict[str, Path]) -> None:
    code = (
        "import sys; from dflash_core.checkpoints.checkpoint import open_checkpoint; "
        "from dflash_core.checkpoints.mask_token import choose_mask_token; "
        "choose_mask_token(open_checkpoint(sys.argv[1])); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, originals["qwen3"]], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_transformers_4_spelling_is_the_same_checkpoint(originals: dict[str, Path], tmp_path: Path) -> None:
    older = tiny.copy(originals["llama"], tmp_path / "older")
    with tiny.editing(older / "config.json") as config:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = int(rope.pop("rope_theta"))
        rope["type"] = rope.pop("rope_type")
        config |= {"rope_scaling": rope, "torch_dtype": "torch." + config.pop("dtype"), "use_cache": False}
        config |= {"transformers_version": "4.40.0", "_name_or_path": "somewhere/else"}
    assert (
        open_checkpoint(older).config.rope_parameters
        == open_checkpoint(originals["llama"]).config.rope_parameters
    )
    assert tiny.print_of(older) == tiny.print_of(originals["llama"])


def test_the_hub_cache_layout_is_accepted(originals: dict[str, Path], tmp_path: Path) -> None:
    snapshot = tiny.hub_cache(originals["qwen3"], tmp_path / "hub")
    assert (snapshot / "config.json").is_symlink()
    assert tiny.print_of(snapshot) == tiny.print_of(originals["qwen3"])


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_tokenizer_is_the_file_s_own_with_the_template_in_force(
    originals: dict[str, Path], name: str
) -> None:
    from tokenizers import Tokenizer

    checkpoint = open_checkpoint(originals[name], chat_template="{{ messages[0].content }}!")
    tokenizer = load_tokenizer(checkpoint)
    text = "<|im_start|>a+b=c<|im_end|>"
    raw = Tokenizer.from_file(str(originals[name] / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == raw.encode(text).ids
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "hi!"


def test_a_template_that_does_not_render_is_refused(originals: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(originals["qwen3"], chat_template="{{ raise_exception('no users') }}")
    with pytest.raises(UserError, match=r"no users.*--chat-template"):
        load_tokenizer(checkpoint)


# Identity


def test_fingerprint_ignores_sharding_place_and_metadata(originals: dict[str, Path], qwen3: Path) -> None:
    tiny.edit_header(
        qwen3 / "model.safetensors", lambda header: header.update(__metadata__={"made": "by us"})
    )
    assert tiny.print_of(qwen3) == tiny.print_of(originals["qwen3"]) == tiny.print_of(originals["sharded"])


def test_a_redundant_copy_of_the_tied_head_is_the_same_checkpoint(
    originals: dict[str, Path], qwen3: Path
) -> None:
    tiny.edit_weights(
        qwen3, lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"].copy()})
    )
    assert open_checkpoint(qwen3).num_parameters == open_checkpoint(originals["qwen3"]).num_parameters
    assert tiny.print_of(qwen3) == tiny.print_of(originals["qwen3"])


def _nudge_weight(folder: Path) -> None:
    def change(arrays: dict[str, Any]) -> None:
        arrays["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-6

    tiny.edit_weights(folder, change)


def _swap_tensors(folder: Path) -> None:
    first, second = (f"model.layers.{index}.self_attn.q_proj.weight" for index in (0, 1))
    tiny.edit_weights(folder, lambda arrays: arrays.update({first: arrays[second], second: arrays[first]}))


def _swap_vocabulary(folder: Path) -> None:
    with tiny.editing(folder / "tokenizer.json") as tokenizer:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]


@pytest.mark.parametrize(
    "change",
    [
        _nudge_weight,
        _swap_tensors,
        lambda folder: tiny.set_json(folder / "config.json", rms_norm_eps=1e-5),
        lambda folder: tiny.set_json(
            folder / "config.json", rope_parameters={"rope_theta": 10_001.0, "rope_type": "default"}
        ),
        lambda folder: tiny.set_json(folder / "config.json", max_position_embeddings=256),
        lambda folder: tiny.set_json(folder / "generation_config.json", eos_token_id=3),
        _swap_vocabulary,
        lambda folder: (folder / "chat_template.jinja").write_text(tiny.TEMPLATE + " "),
    ],
    ids=["weight", "tensors", "eps", "theta", "length", "eos", "vocabulary", "template"],
)
def test_fingerprint_sees(originals: dict[str, Path], qwen3: Path, change: Callable[[Path], None]) -> None:
    change(qwen3)
    assert tiny.print_of(qwen3) != tiny.print_of(originals["qwen3"])


def test_family_holds_across_weights_and_templates_only(originals: dict[str, Path], qwen3: Path) -> None:
    family = open_checkpoint(originals["qwen3"]).family
    assert re.fullmatch(r"dflash-qwen3-32x2-[0-9a-f]{8}", family)
    _nudge_weight(qwen3)
    (qwen3 / "chat_template.jinja").write_text("{{ messages }}")
    assert open_checkpoint(qwen3).family == family
    _swap_vocabulary(qwen3)
    assert open_checkpoint(qwen3).family != family
    assert len({open_checkpoint(path).family for path in originals.values()}) == 4


def test_a_given_template_counts_as_the_checkpoint_s_own(originals: dict[str, Path], qwen3: Path) -> None:
    (qwen3 / "chat_template.jinja").rename(qwen3.parent / "other.jinja")
    assert tiny.print_of(qwen3, chat_template=str(qwen3.parent / "other.jinja")) == tiny.print_of(
        originals["qwen3"]
    )
    assert tiny.print_of(qwen3, chat_template=tiny.TEMPLATE) == tiny.print_of(originals["qwen3"])
    with tiny.editing(qwen3 / "tokenizer_config.json") as config:
        config["chat_template"] = [{"name": "default", "template": tiny.TEMPLATE}]
    assert tiny.print_of(qwen3) == tiny.print_of(originals["qwen3"])


# Cache of digests


def test_an_unchanged_directory_is_not_hashed_again(qwen3: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = tiny.print_of(qwen3, cache_dir=cache)
    weights, stored = qwen3 / "model.safetensors", cache_file(cache, qwen3).stat().st_mtime_ns
    before = weights.stat()
    assert tiny.print_of(qwen3, cache_dir=cache) == first == tiny.print_of(qwen3)
    # Had it hashed again, it would have written the cache again, as a new file.
    assert cache_file(cache, qwen3).stat().st_mtime_ns == stored
    _nudge_weight(qwen3)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_size == before.st_size
    changed = tiny.print_of(qwen3, cache_dir=cache)
    assert changed == tiny.print_of(qwen3) != first
    assert list(cache.iterdir()) == [cache_file(cache, qwen3)]


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "\x00\xff", "digest", "seal"])
def test_a_damaged_cache_is_ignored_and_mended(qwen3: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    first = tiny.print_of(qwen3, cache_dir=cache)
    place = cache_file(cache, qwen3)
    good = place.read_text()
    if damage == "digest":
        place.write_text(re.sub(r'(norm.weight": ")[0-9a-f]{2}', r"\g<1>00", good, count=1))
    elif damage == "seal":
        place.write_text(good.replace('"seal"', '"other"'))
    else:
        place.write_text(damage)
    assert tiny.print_of(qwen3, cache_dir=cache) == first
    assert place.read_text() == good


def test_cached_digests_do_not_excuse_the_other_checks(qwen3: Path, tmp_path: Path) -> None:
    open_checkpoint(qwen3, cache_dir=tmp_path / "cache")
    tiny.set_json(qwen3 / "config.json", vocab_size=121)
    assert "model.embed_tokens.weight" in tiny.refusal(qwen3, cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_costs_the_reading_and_no_more(qwen3: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert tiny.print_of(qwen3, cache_dir=tmp_path / "cache") == tiny.print_of(qwen3)
    assert tiny.print_of(qwen3, cache_dir=Path("/proc/no-home/cache")) == tiny.print_of(qwen3)
