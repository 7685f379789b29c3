"""Rows of a dataset through HF `datasets`, streamed: a hub id, or a dataset's folder with splits."""

from __future__ import annotations

import re
from typing import Any

from dflash_core.checkpoints.strict_json import one_line
from dflash_core.errors import UserError
from dflash_core.prompts.json_lines import Rows, an_object
from dflash_core.prompts.row_files import without_nulls
from dflash_core.prompts.source_spec import SourceSpec

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def dataset_rows(spec: SourceSpec, revision: str | None) -> Rows:
    """The rows of one split, `train` unless the spec names another. Raises UserError if it cannot be had."""
    stream = _load(spec, revision)
    number = 0
    try:
        for row in stream:
            number += 1
            where = f"{spec.location} row {number}"
            yield where, an_object(without_nulls(row), where)
    except UserError:
        raise
    # Readers of every format and network stand behind this iterator.
    except Exception as error:
        raise UserError(
            f"{spec.location} cannot be read after row {number} ({one_line(error)}); "
            "check the connection, or download it and pass its folder"
        ) from error


def resolved_revision(spec: SourceSpec) -> str:
    """The commit that a hub id means now. Raises UserError if the Hub cannot say."""
    if spec.revision and _COMMIT.fullmatch(spec.revision):
        return spec.revision
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(spec.location, revision=spec.revision).sha
    # One exception per way in which a Hub can fail: id, rights, revision, network.
    except Exception as error:
        raise UserError(
            f"{spec.location} is no file or folder here, and as a dataset of the Hub it cannot be found "
            f"({one_line(error)}); check the path or the id, or download it and pass its folder"
        ) from error
    assert commit is not None
    return commit


def _load(spec: SourceSpec, revision: str | None) -> Any:
    import datasets

    datasets.disable_progress_bars()
    path = spec.path
    name = str(path) if spec.is_here else spec.location
    try:
        return datasets.load_dataset(
            name, spec.config, split=spec.split or "train", revision=revision, streaming=True
        )
    except Exception as error:
        raise UserError(
            f"{spec.location} cannot be opened as a dataset ({one_line(error)}); "
            "check ?config= and ?split=, or the connection"
        ) from error
