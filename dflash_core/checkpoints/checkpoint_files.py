"""What kind of directory is this: a Hugging Face safetensors checkpoint, or something we can name.

Checks that need no file's content: the directory itself, links that leave it, and the layouts of
other tools, each refused with the way to convert it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dflash_core.checkpoints.safetensors_index import INDEX, SINGLE
from dflash_core.errors import UserError

_MAX_ENTRIES = 10_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def check_directory(directory: Path) -> None:
    """Raise UserError unless `directory` looks like a Hugging Face checkpoint in safetensors format."""
    if not directory.exists():
        raise UserError(
            f"checkpoint directory {directory} does not exist: pass an existing directory, "
            "or a Hugging Face id such as org/name"
        )
    if not directory.is_dir():
        raise UserError(
            f"{directory} is a file, not a checkpoint directory: pass the directory that holds it"
        )
    names = {entry.name for entry in os.scandir(directory)}
    if "adapter_config.json" in names:
        raise UserError(
            f"{directory} is an adapter (adapter_config.json), not a whole model: "
            "merge it into its base model with merge_and_unload and pass the result"
        )
    _refuse_foreign_layouts(directory, names)
    if "config.json" not in names:
        raise UserError(f"{directory} has no config.json: {_nested_hint(directory)}")
    _refuse_missing_weights(directory, names)
    _refuse_outside_links(directory)


def _refuse_foreign_layouts(directory: Path, names: set[str]) -> None:
    if SINGLE in names or INDEX in names:
        return
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        raise UserError(
            f"{directory} is a PyTorch distributed checkpoint (.distcp): "
            "export it to Hugging Face safetensors with the tool that trained it"
        )
    if "latest_checkpointed_iteration.txt" in names or any(
        name.startswith(("iter_", "mp_rank_")) for name in names
    ):
        raise UserError(
            f"{directory} is a Megatron checkpoint: "
            "convert it to Hugging Face safetensors with Megatron Bridge"
        )
    if "zero_to_fp32.py" in names or any(name.startswith("global_step") for name in names):
        raise UserError(
            f"{directory} is a DeepSpeed checkpoint: convert it with zero_to_fp32.py --safe_serialization"
        )
    if any(name.endswith(".gguf") for name in names):
        raise UserError(
            f"{directory} holds GGUF weights only: "
            "load them with transformers' gguf_file= and use save_pretrained"
        )


def _refuse_missing_weights(directory: Path, names: set[str]) -> None:
    if SINGLE in names or INDEX in names:
        return
    pickles = sorted(name for name in names if name.endswith(_PICKLES))
    if pickles:
        raise UserError(
            f"{directory} has pickled weights only ({pickles[0]}), which can run code when read: "
            "convert them to safetensors with save_pretrained"
        )
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    if shards:
        raise UserError(
            f"{directory} has {shards[0]} but neither {SINGLE} nor {INDEX}: copy or download it again"
        )
    raise UserError(
        f"{directory} has no safetensors weights: copy or download {SINGLE} or its shards and {INDEX}"
    )


def _nested_hint(directory: Path) -> str:
    """The remedy for a directory without a config, naming a child that has one."""
    children = sorted(child for child in directory.iterdir() if (child / "config.json").is_file())
    if children:
        return f"did you mean {max(children, key=lambda child: child.stat().st_mtime)}?"
    return "pass the directory that save_pretrained wrote"


def _refuse_outside_links(directory: Path) -> None:
    root = Path(os.path.realpath(directory))
    allowed = [root, *_hub_blobs(root)]
    for number, path in enumerate(_walk(root)):
        if number >= _MAX_ENTRIES:
            raise UserError(
                f"{directory} holds over {_MAX_ENTRIES:,} files: pass the checkpoint's own directory"
            )
        if not path.is_symlink():
            continue
        # realpath, because Path.resolve raises on a circle of links.
        target = Path(os.path.realpath(path))
        if not target.exists():
            raise UserError(
                f"{path} links to {target}, which is missing: copy or download the checkpoint again"
            )
        if not any(target.is_relative_to(top) for top in allowed):
            raise UserError(
                f"{path} links out of the checkpoint (to {target}): replace the link with a copy of the file"
            )


def _hub_blobs(root: Path) -> list[Path]:
    """In the Hub's cache a snapshot's files are links to the blobs of the same repository."""
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        return [root.parent.parent / "blobs"]
    return []


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in [*folders, *files])
