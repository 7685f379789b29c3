"""What we need of a checkpoint's tokenizer, read from its files without transformers.

`tokenizer.json` is parsed by the `tokenizers` library, the same code that serving runs;
`tokenizer_config.json` adds the names of the special tokens and, often, the chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_core.checkpoints.strict_json import (
    MEBIBYTE,
    one_line,
    parse_object,
    read_bytes,
    read_object,
    read_text,
)
from dflash_core.errors import UserError
from dflash_core.fingerprint import fingerprint

ROLES = ("bos", "eos", "pad", "unk")
MAX_TEMPLATE_BYTES = 4 * MEBIBYTE
_MAX_VOCABULARY_BYTES = 512 * MEBIBYTE
_MAX_CONFIG_BYTES = 64 * MEBIBYTE


@dataclass(frozen=True)
class AddedToken:
    """A token matched as a whole before the text is split."""

    id: int
    text: str
    special: bool


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer's identity and its special tokens."""

    vocabulary: Mapping[str, int]
    """Text -> id, added tokens included."""
    added: tuple[AddedToken, ...]
    """By id."""
    role_ids: Mapping[str, int]
    """Role (one of `ROLES`) -> id, where the tokenizer names one."""
    digest: str
    """sha256 over all that decides how text becomes ids."""

    @property
    def num_ids(self) -> int:
        """Highest id + 1."""
        return max(self.vocabulary.values()) + 1


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """Read and check `tokenizer.json` and `tokenizer_config.json`.

    Raises UserError when there is none, it is malformed, it asks for remote code, or its config
    names a token that the vocabulary lacks (transformers would then grow the vocabulary on loading).
    """
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if not path.exists():
        raise UserError(
            f"{directory} has no tokenizer.json: save the model's fast tokenizer there with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    data = read_bytes(path, _MAX_VOCABULARY_BYTES)
    parsed = parse_object(data, str(path))
    try:
        tokenizer = Tokenizer.from_str(data.decode())
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
    except (KeyboardInterrupt, SystemExit):
        raise
    # The Rust side raises bare Exception for bad content, and BaseException where it panics.
    except BaseException as error:  # noqa: BLE001
        raise UserError(f"{path} is no usable tokenizer ({one_line(error)}): save or copy it again") from None
    if not vocabulary:
        raise UserError(f"{path} has an empty vocabulary: save or copy it again")
    return TokenizerFiles(
        vocabulary=vocabulary,
        added=tuple(AddedToken(key, added[key].content, added[key].special) for key in sorted(added)),
        role_ids=_role_ids(directory, vocabulary),
        digest=_digest(parsed),
    )


def read_chat_template(directory: Path) -> str | None:
    """The checkpoint's own template: `chat_template.jinja`, else `tokenizer_config.json`'s, or None."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return read_text(path, MAX_TEMPLATE_BYTES)
    template = _read_config(directory).get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UserError(
            f"{directory / 'tokenizer_config.json'}: chat_template is no text: pass --chat-template"
        )
    return template


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return read_object(path, _MAX_CONFIG_BYTES) if path.exists() else {}


def _role_ids(directory: Path, vocabulary: Mapping[str, int]) -> dict[str, int]:
    path, config = directory / "tokenizer_config.json", _read_config(directory)
    if config.get("auto_map") is not None:
        raise UserError(f"{path} has auto_map, which runs code shipped with the checkpoint: remove that key")
    legacy = directory / "special_tokens_map.json"
    if legacy.exists():
        config = {**read_object(legacy, _MAX_CONFIG_BYTES), **config}
    found: dict[str, int] = {}
    for key, text in _named_tokens(config):
        if text not in vocabulary:
            raise UserError(
                f"{path} names {text!r} ({key}), which tokenizer.json does not hold: "
                "save the tokenizer again with save_pretrained, or remove the name"
            )
        role = key.removesuffix("_token")
        if role in ROLES:
            found[role] = vocabulary[text]
    return found


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, text) of every token that the config makes the tokenizer hold."""
    for key in [*(f"{role}_token" for role in ROLES), "mask_token", "sep_token", "cls_token"]:
        yield from ((key, text) for text in _texts(config.get(key)))
    for key in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        value = config.get(key)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        yield from ((key, text) for item in items for text in _texts(item))


def _texts(token: Any) -> Iterator[str]:
    """A token as configs write it: its text, or an object with the text in `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    if isinstance(text, str):
        yield text


def _digest(parsed: dict[str, Any]) -> str:
    """Identity of the tokenizer: what the library left in the file of its last call does not count."""
    content = {key: value for key, value in parsed.items() if key not in ("truncation", "padding", "version")}
    model = content.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        # Older files write a merge as "a b", newer ones as ["a", "b"].
        merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
        content["model"] = {**model, "merges": merges}
    return fingerprint(content)
