"""Which checkpoint is this, and which model is it a checkpoint of: the fingerprint and the family name."""

from __future__ import annotations

from collections.abc import Mapping

from dflash_core.checkpoints.rope import CONFIG_KEYS as ROPE_KEYS
from dflash_core.checkpoints.target_config import decoder_shape
from dflash_core.checkpoints.tokenizer_files import TokenizerFiles
from dflash_core.fingerprint import fingerprint
from dflash_core.types import TargetConfig

FINGERPRINT_VERSION = 1
"""Raise to make every fingerprint differ from those of earlier code."""
_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "_attn_implementation_autoset",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
"""Keys of config.json that do not change what the model computes, or that count in another spelling."""


def checkpoint_fingerprint(
    config: TargetConfig,
    digests: Mapping[str, str],
    tokenizer: TokenizerFiles,
    chat_template: str,
    eos_ids: tuple[int, ...],
) -> str:
    """sha256 over all that decides what the target says: weights, config, tokenizer, template, stops.

    `digests` are per tensor; neither the path, the sharding nor the config's spelling counts.
    """
    settings = {
        key: value
        for key, value in config.raw.items()
        if value is not None and key not in _VOLATILE and key not in ROPE_KEYS
    }
    settings |= {
        "rope": config.rope_parameters,
        "dtype": config.torch_dtype,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    return fingerprint(
        {
            "version": FINGERPRINT_VERSION,
            "weights": digests,
            "config": settings,
            "tokenizer": tokenizer.digest,
            "chat_template": chat_template,
            "eos_ids": eos_ids,
        }
    )


def family_name(config: TargetConfig, tokenizer: TokenizerFiles) -> str:
    """What all checkpoints of a model share (architecture, sizes, vocabulary), as a name MLflow accepts."""
    same = fingerprint([config.architecture, decoder_shape(config), tokenizer.vocabulary])[:8]
    return f"dflash-{config.model_type}-{config.hidden_size}x{config.num_layers}-{same}"
