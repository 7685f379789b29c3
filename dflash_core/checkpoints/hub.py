"""From what the user typed to a directory: a path as it is, a Hugging Face id fetched into the cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dflash_core.errors import UserError

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./+-]+))?", re.ASCII)
ALLOWED = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "vocab*", "merges.txt"]
"""Weights in safetensors, configs and the tokenizer. Never pickles, never code."""
IGNORED = ["*/*", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.py", "*.gguf"]


def resolve_target(text: str) -> Path:
    """The directory that `text` means: an existing path, or `org/name[@revision]` from the Hub.

    Raises UserError when a path does not exist, the text is neither, or the Hub cannot give it.
    """
    path = Path(text).expanduser()
    if text and path.exists():
        return path
    match = _HUB_ID.fullmatch(text)
    if match is None or text.startswith((".", "/", "~")):
        raise UserError(
            f"checkpoint directory {text} does not exist: pass an existing directory, "
            "or a Hugging Face id such as org/name or org/name@revision"
        )
    return _fetch(match["repo"], match["revision"])


def _fetch(repo: str, revision: str | None) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=ALLOWED, ignore_patterns=IGNORED)
    except GatedRepoError:
        reason, remedy = "access to it is restricted", "accept its terms on the Hub and set HF_TOKEN"
    except RepositoryNotFoundError:
        reason, remedy = "the Hub has no such model, or not for this account", "check the id, or set HF_TOKEN"
    except RevisionNotFoundError:
        reason, remedy = f"it has no revision {revision}", "check the part after @"
    except HFValidationError as error:
        reason, remedy = str(error).partition("\n")[0], "check the id"
    except (LocalEntryNotFoundError, httpx.HTTPError, ConnectionError):
        reason, remedy = (
            "the Hub cannot be reached",
            "connect, or download it elsewhere and pass its directory",
        )
    except OSError as error:
        reason, remedy = (
            error.strerror or str(error).partition("\n")[0],
            f"check {_cache_home()} and the connection",
        )
    else:
        return Path(folder)
    where = f"{repo}@{revision}" if revision else repo
    raise UserError(f"{where} is no directory here and cannot be fetched ({reason}): {remedy}")


def _cache_home() -> str:
    return os.environ.get("HF_HOME", "~/.cache/huggingface")
