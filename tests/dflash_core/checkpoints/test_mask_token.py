"""Choosing the mask row: the order of preference, and what is never chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_core.checkpoints.checkpoint import open_checkpoint
from dflash_core.checkpoints.mask_token import MaskToken, choose_mask_token
from dflash_core.errors import UserError
from tests.dflash_core import tiny_checkpoints as tiny


@pytest.fixture(scope="session")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embedding rows 101 to 119 belong to no token."""
    return tiny.build(tmp_path_factory.mktemp("mask") / "padded", "qwen3", tie_word_embeddings=True)


@pytest.fixture
def exact(padded: Path, tmp_path: Path) -> Path:
    """Every row of the embedding belongs to a token."""
    return _with_rows(tiny.copy(padded, tmp_path / "exact"), tiny.ZOOM + 1)


def _with_rows(folder: Path, rows: int) -> Path:
    name = "model.embed_tokens.weight"
    with tiny.editing(folder / "config.json") as config:
        config["vocab_size"] = rows
    tiny.edit_weights(folder, lambda arrays: arrays.update({name: np.ascontiguousarray(arrays[name][:rows])}))
    return folder


def choose(folder: Path, explicit: int | None = None, **options: Any) -> MaskToken:
    return choose_mask_token(open_checkpoint(folder, **options), explicit)


def rename(folder: Path, token_id: int, text: str, *, special: bool = True) -> None:
    with tiny.editing(folder / "tokenizer.json") as tokenizer:
        for token in tokenizer["added_tokens"]:
            if token["id"] == token_id:
                old, token["content"], token["special"] = token["content"], text, special
    with tiny.editing(folder / "tokenizer_config.json") as config:
        names = config["extra_special_tokens"]
        config["extra_special_tokens"] = [text if name == old else name for name in names]


def test_a_row_beyond_the_tokenizer_comes_before_an_unused_token(padded: Path) -> None:
    mask = choose(padded)
    assert (mask.id, mask.text) == (tiny.ZOOM + 1, None)
    assert "Row 101 is the first of 19 rows" in mask.reason


def test_an_all_zero_spare_row_will_do(padded: Path, tmp_path: Path) -> None:
    folder = tiny.copy(padded, tmp_path / "zero")
    tiny.edit_weights(folder, lambda arrays: arrays["model.embed_tokens.weight"][101:].fill(0))
    assert choose(folder).id == tiny.ZOOM + 1


@pytest.mark.parametrize("name", ["<|mask|>", "<mask>", "[MASK]", "<|MASK_TOKEN|>", "<|mask_0|>"])
def test_a_token_named_mask_comes_first(padded: Path, tmp_path: Path, name: str) -> None:
    folder = tiny.copy(padded, tmp_path / "named")
    rename(folder, tiny.TOOL, name)
    expected = tiny.ZOOM + 1 if name == "<|mask_0|>" else tiny.TOOL
    assert choose(folder).id == expected


def test_a_mask_named_in_the_template_is_passed_over(padded: Path, tmp_path: Path) -> None:
    folder = tiny.copy(padded, tmp_path / "used")
    rename(folder, tiny.TOOL, "<|mask|>")
    assert choose(folder, chat_template="<|mask|>" + tiny.TEMPLATE).id == tiny.ZOOM + 1


def test_reserved_names_come_before_higher_ids(exact: Path) -> None:
    mask = choose(exact)
    assert (mask.id, mask.text) == (tiny.RESERVED_7, "<|reserved_7|>")
    assert "<|reserved_7|> (id 99)" in mask.reason


@pytest.mark.parametrize("name", ["<empty_output>", "<unused12>", "[PLACEHOLDER]"])
def test_other_names_that_sound_unused(exact: Path, name: str) -> None:
    rename(exact, tiny.RESERVED_3, "<a>")
    rename(exact, tiny.RESERVED_7, "<b>")
    rename(exact, tiny.TOOL, name)
    assert choose(exact).text == name


def test_then_the_highest_special_id_that_nothing_uses(exact: Path) -> None:
    for token_id, name in ((tiny.RESERVED_3, "<a>"), (tiny.RESERVED_7, "<b>")):
        rename(exact, token_id, name)
    assert choose(exact).id == tiny.ZOOM
    assert choose(exact, chat_template="<|zoom|>" + tiny.TEMPLATE).text == "<b>"
    rename(exact, tiny.RESERVED_7, "<b>", special=False)
    assert choose(exact, chat_template="<|zoom|>" + tiny.TEMPLATE).text == "<a>"
    with tiny.editing(exact / "generation_config.json") as generation:
        generation["eos_token_id"] = tiny.ZOOM
    assert choose(exact).text == "<a>"


def test_none_left_is_an_error_that_names_the_flag(exact: Path) -> None:
    template = "".join(tiny.SPECIAL) + "{{ messages }}"
    with pytest.raises(UserError, match=r"no unused row.*--mask-token-id"):
        choose(exact, chat_template=template)
    mask = choose(exact, explicit=3, chat_template=template)
    assert (mask.id, mask.text) == (3, "$")
    assert "ordinary entry" in mask.reason


def test_an_explicit_row_is_taken(padded: Path) -> None:
    assert choose(padded, explicit=110).text is None
    mask = choose(padded, explicit=tiny.TOOL)
    assert mask == MaskToken(tiny.TOOL, "<|tool|>", f"Row {tiny.TOOL} was named with --mask-token-id.")


@pytest.mark.parametrize(
    ("explicit", "said"),
    [
        (-1, "no row of the embedding.*pass 0 to 119"),
        (tiny.VOCAB, "no row of the embedding"),
        (tiny.IM_END, "an eos token"),
        (tiny.ENDOFTEXT, "the pad token"),
        (tiny.IM_START, "part of the chat template"),
        (5, "the bos token"),
        (6, "the unk token"),
        (7, "an eos token"),
    ],
)
def test_an_explicit_row_with_another_use_is_refused(
    padded: Path, tmp_path: Path, explicit: int, said: str
) -> None:
    folder = tiny.copy(padded, tmp_path / "roles")
    with tiny.editing(folder / "config.json") as config:
        config |= {"bos_token_id": 5, "eos_token_id": 7}
    with tiny.editing(folder / "tokenizer_config.json") as config:
        config["unk_token"] = chr(33 + 6)
    with pytest.raises(UserError, match=f"--mask-token-id {explicit} is.*{said}"):
        choose(folder, explicit=explicit)
