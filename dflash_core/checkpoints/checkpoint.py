"""Open a target checkpoint: everything is validated and identified before anything is loaded.

Free of torch and transformers, so that a rerun with nothing to do costs seconds. What is checked
lives next door: `checkpoint_files` (directory), `target_config` and `rope` (config.json),
`safetensors_index` (headers), `weight_digests` (bytes), `tokenizer_files`; what it is called in
`checkpoint_identity`.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_core.checkpoints.architectures import ARCHITECTURES, EMBEDDING, HEAD, expected_tensors
from dflash_core.checkpoints.checkpoint_files import check_directory
from dflash_core.checkpoints.checkpoint_identity import checkpoint_fingerprint, family_name
from dflash_core.checkpoints.digest_cache import cache_file, load_digests, signature, store_digests
from dflash_core.checkpoints.hub import resolve_target
from dflash_core.checkpoints.safetensors_index import TensorEntry, read_tensors
from dflash_core.checkpoints.strict_json import MEBIBYTE, one_line, read_object, read_text
from dflash_core.checkpoints.target_config import decoder_shape, read_target_config
from dflash_core.checkpoints.tokenizer_files import (
    MAX_TEMPLATE_BYTES,
    TokenizerFiles,
    read_chat_template,
    read_tokenizer,
)
from dflash_core.checkpoints.weight_digests import digest_tensors
from dflash_core.errors import UserError
from dflash_core.types import Checkpoint, TargetConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_tokenizer", "open_checkpoint", "resolve_target"]

_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_IGNORED_TENSOR = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Saved by old versions, computed from the config by all."""


def open_checkpoint(
    path: str | Path, *, chat_template: str | None = None, cache_dir: Path | None = None
) -> Checkpoint:
    """Validate the target directory at `path` and identify it.

    `chat_template` stands in for the checkpoint's own: a file's path, or the template itself (it
    contains a brace). With `cache_dir`, an unchanged directory's weights are not read again.
    Raises UserError, naming the file and the remedy, for anything that cannot be used.
    """
    directory = Path(path).expanduser().absolute()
    try:
        return _open(directory, chat_template, cache_dir)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory} cannot be read or written ({error.strerror}): "
            "check it and its permissions"
        ) from error


def load_tokenizer(checkpoint: Checkpoint) -> PreTrainedTokenizerBase:
    """The tokenizer as serving loads it, with the checkpoint's chat template set; no remote code, no network.

    Raises UserError when transformers cannot load it, when it then holds other ids than
    tokenizer.json, or when the chat template does not render a plain user message.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint.path, trust_remote_code=False, local_files_only=True
        )
    # A stranger's files met by a large library: whatever it raises, the files are at fault.
    except Exception as error:
        raise UserError(
            f"transformers cannot load the tokenizer in {checkpoint.path} ({one_line(error)}): "
            "save it again with save_pretrained"
        ) from error
    num_ids = max(tokenizer.get_vocab().values()) + 1
    if num_ids != checkpoint.num_tokenizer_ids:
        raise UserError(
            f"the tokenizer in {checkpoint.path} has {num_ids} ids when loaded but "
            f"{checkpoint.num_tokenizer_ids} in tokenizer.json: save it again with save_pretrained"
        )
    tokenizer.chat_template = checkpoint.chat_template
    # Lengths are checked against the model's positions, with an error; this is for a warning beside it.
    tokenizer.model_max_length = sys.maxsize
    try:
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
        )
    # The template is the user's own program: it can fail in any way.
    except Exception as error:
        raise UserError(
            f"the chat template of {checkpoint.path} does not render ({one_line(error)}): "
            "correct it or pass --chat-template"
        ) from error
    return tokenizer


def _open(directory: Path, chat_template: str | None, cache_dir: Path | None) -> Checkpoint:
    check_directory(directory)
    config = read_target_config(directory / "config.json")
    tensors = {
        name: entry for name, entry in read_tensors(directory).items() if not _IGNORED_TENSOR.fullmatch(name)
    }
    _check_tensors(directory, config, tensors)
    if not config.torch_dtype:
        config = replace(config, torch_dtype=_DTYPE_NAMES[tensors[EMBEDDING].dtype])
    tokenizer = read_tokenizer(directory)
    if tokenizer.num_ids > config.vocab_size:
        raise UserError(
            f"the tokenizer in {directory} has ids up to {tokenizer.num_ids - 1} but the embedding has only "
            f"{config.vocab_size} rows: pass the tokenizer that the model was trained with, "
            "or resize the embedding"
        )
    template = _template(directory, chat_template)
    ids = _special_ids(directory, config, tokenizer)
    digests = _digests(directory, tensors, cache_dir)
    if config.tie_word_embeddings and HEAD in digests:
        # Once more than the embedding is no other model than once.
        _check_tied_head(directory, digests)
        del digests[HEAD], tensors[HEAD]
    return Checkpoint(
        path=directory,
        config=config,
        fingerprint=checkpoint_fingerprint(config, digests, tokenizer, template, ids["eos"]),
        family=family_name(config, tokenizer),
        num_parameters=sum(math.prod(entry.shape) for entry in tensors.values()),
        chat_template=template,
        eos_ids=ids["eos"],
        pad_id=next(iter(ids["pad"]), None),
        bos_id=next(iter(ids["bos"]), None),
        num_tokenizer_ids=tokenizer.num_ids,
    )


def _check_tensors(directory: Path, config: TargetConfig, tensors: Mapping[str, TensorEntry]) -> None:
    """The files hold exactly the tensors that the config describes; a tied head may be left out."""
    expected = expected_tensors(ARCHITECTURES[config.architecture], decoder_shape(config))
    if config.tie_word_embeddings and HEAD not in tensors:
        del expected[HEAD]
    # Shapes first: a wrong size in the config is the likelier cause, and says more.
    for name in sorted(expected.keys() & tensors.keys()):
        if tensors[name].shape != expected[name]:
            raise UserError(
                f"{tensors[name].shard}: tensor {name} has shape {list(tensors[name].shape)} but config.json "
                f"asks for {list(expected[name])}: pair the weights with their own config.json"
            )
    for name in sorted(expected.keys() - tensors.keys()):
        raise UserError(
            f"{directory} lacks tensor {name}, which config.json asks for: "
            "copy the whole checkpoint again or correct config.json"
        )
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(
            f"{tensors[name].shard} holds tensor {name}, which {config.architecture} of "
            f"{config.num_layers} layers does not have: export the plain model, or correct config.json"
        )


def _check_tied_head(directory: Path, digests: Mapping[str, str]) -> None:
    # If they differ, transformers decodes with the head and other engines with the embedding.
    if digests[HEAD] != digests[EMBEDDING]:
        raise UserError(
            f"{directory} holds a {HEAD} that differs from the embedding although "
            "tie_word_embeddings is true: set it to false or remove the tensor"
        )


def _template(directory: Path, given: str | None) -> str:
    """The chat template in force: `given` (text or a file's path) before the checkpoint's own."""
    template = read_chat_template(directory) if given is None else _given_template(given)
    if not template or not template.strip():
        raise UserError(f"{directory} has no chat template: pass one with --chat-template FILE")
    return template


def _given_template(given: str) -> str:
    if "{" in given:
        # A command line can hold bytes that are no text, which no fingerprint can.
        return given.encode(errors="replace").decode()
    path = Path(given).expanduser()
    if not path.is_file():
        raise UserError(f"chat template {given} is neither a file nor a template: pass --chat-template FILE")
    return read_text(path, MAX_TEMPLATE_BYTES)


def _special_ids(
    directory: Path, config: TargetConfig, tokenizer: TokenizerFiles
) -> dict[str, tuple[int, ...]]:
    """Role ("eos", "bos", "pad") -> ids, the tokenizer's before the configs'; eos sorted, without repeats."""
    path = directory / "generation_config.json"
    sources: list[tuple[Path, Mapping[str, Any]]] = [(directory / "config.json", config.raw)]
    if path.exists():
        sources.append((path, read_object(path, 4 * MEBIBYTE)))
    found: dict[str, tuple[int, ...]] = {}
    for role in ("eos", "bos", "pad"):
        ids = [tokenizer.role_ids[role]] if role in tokenizer.role_ids else []
        for source, values in sources:
            ids += _ids(source, f"{role}_token_id", values.get(f"{role}_token_id"), config.vocab_size)
        found[role] = tuple(dict.fromkeys(ids))
    return found | {"eos": tuple(sorted(found["eos"]))}


def _ids(path: Path, key: str, value: Any, vocab_size: int) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        # Some Llama exports write -1 for "no such token".
        if item is None or item == -1:
            continue
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise UserError(
                f"{path}: {key} is {item!r}, no row of the embedding (0 to {vocab_size - 1}): correct it"
            )
        yield item


def _digests(directory: Path, tensors: Mapping[str, TensorEntry], cache_dir: Path | None) -> dict[str, str]:
    files = {entry.shard for entry in tensors.values()}
    before = signature(files)
    place = cache_file(cache_dir, directory) if cache_dir else None
    stored = load_digests(place, before) if place else None
    if stored is not None and stored.keys() == tensors.keys():
        return stored
    digests = digest_tensors(tensors.values())
    if signature(files) != before:
        raise UserError(
            f"{directory} changed while it was read: wait until its writer has finished and run again"
        )
    if place:
        with contextlib.suppress(OSError):  # a home that cannot be written only costs the reading
            store_digests(place, before, digests)
    return digests
