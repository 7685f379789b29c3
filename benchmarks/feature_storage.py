"""Layouts for feature shards, measured: write, read (cold and warm), one random sample, size.

    python benchmarks/feature_storage.py TARGET PROMPTS.jsonl [--megabytes 384] [--out FILE.json]

The numbers are real hidden states of TARGET on the prompts (compression is judged on nothing else),
repeated to the size asked for. Every layout holds the same samples. Written to the disk (fsync), the best of
three; cold is after the kernel was asked to drop the file's pages, warm right after; reading looks at every
number. All on one thread, one layout after the other.

Then the opening of 200,000 short samples: seconds until lengths are known, and what stays in memory, against
holding a record batch for each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors
import safetensors.torch
import torch
from machine import describe, read_samples
from torch import Tensor

from dflash_core.features.extraction import extract
from dflash_core.features.feature_schema import FeatureMeta, Storage, arrow_schema
from dflash_core.features.feature_shards import FeatureShard, tensor_of
from dflash_core.features.feature_writer import FeatureBatch, write_shard
from dflash_core.models.target import load_target
from dflash_core.types import Sample


class Layout(ABC):
    """One way to keep samples with their features [tokens, width] (bfloat16)."""

    @abstractmethod
    def write(self, folder: Path, batches: list[FeatureBatch]) -> None: ...

    @abstractmethod
    def open(self, folder: Path) -> Any: ...

    @abstractmethod
    def get(self, opened: Any, index: int) -> Tensor: ...


class Ours(Layout):
    def __init__(self, meta: FeatureMeta) -> None:
        self.meta = meta

    def write(self, folder: Path, batches: list[FeatureBatch]) -> None:
        write_shard(folder / "f.arrow", self.meta, batches)

    def open(self, folder: Path) -> FeatureShard:
        return FeatureShard(folder / "f.arrow")

    def get(self, opened: FeatureShard, index: int) -> Tensor:
        return opened[index].features


class Arrow(Layout):
    """A record batch a sample; stream or file format, compressed or not."""

    def __init__(self, meta: FeatureMeta, kind: str, compression: str | None) -> None:
        self.schema, self.kind = arrow_schema(meta), kind
        self.options = pa.ipc.IpcWriteOptions(compression=compression)

    def write(self, folder: Path, batches: list[FeatureBatch]) -> None:
        new = pa.ipc.new_stream if self.kind == "stream" else pa.ipc.new_file
        with new(str(folder / "f.arrow"), self.schema, options=self.options) as writer:
            for columns in _rows(batches):
                writer.write_batch(pa.record_batch(columns, schema=self.schema))

    def open(self, folder: Path) -> list[pa.RecordBatch]:
        source = pa.memory_map(str(folder / "f.arrow"))
        if self.kind == "file":
            return pa.ipc.open_file(source)
        # What is compressed is decompressed when a batch is read, so a stream is not opened as a whole.
        starts = []
        schema = pa.ipc.read_schema(source)
        while (start := source.tell()) < source.size() - 8:
            pa.ipc.read_message(source)
            starts.append(start)
        return (source, schema, starts)  # type: ignore[return-value]

    def get(self, opened: Any, index: int) -> Tensor:
        if self.kind == "file":
            batch = opened.get_batch(index)
        else:
            source, schema, starts = opened
            source.seek(starts[index])
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
        return tensor_of(batch.column("features").values)


class Parquet(Layout):
    def __init__(self, meta: FeatureMeta, compression: str) -> None:
        self.schema, self.compression = arrow_schema(meta), compression

    def write(self, folder: Path, batches: list[FeatureBatch]) -> None:
        path = folder / "f.parquet"
        with pq.ParquetWriter(
            path, self.schema, compression=self.compression, use_dictionary=False
        ) as writer:
            for columns in _rows(
                batches
            ):  # a row group a sample: anything larger reads more than was asked for
                writer.write_batch(pa.record_batch(columns, schema=self.schema))

    def open(self, folder: Path) -> pq.ParquetFile:
        return pq.ParquetFile(folder / "f.parquet", memory_map=True)

    def get(self, opened: pq.ParquetFile, index: int) -> Tensor:
        column = opened.read_row_group(index, columns=["features"], use_threads=False).column(0)
        return tensor_of(column.chunk(0).values)


class Safetensors(Layout):
    def write(self, folder: Path, batches: list[FeatureBatch]) -> None:
        rows = (row for batch in batches for row in batch.rows())
        safetensors.torch.save_file(
            {f"{i:06d}": f.clone() for i, (_, f) in enumerate(rows)}, folder / "f.safetensors"
        )

    def open(self, folder: Path) -> Any:
        return safetensors.safe_open(folder / "f.safetensors", "pt")

    def get(self, opened: Any, index: int) -> Tensor:
        return opened.get_tensor(f"{index:06d}")


class SaveToDisk(Layout):
    def __init__(self, meta: FeatureMeta) -> None:
        self.schema = arrow_schema(meta)

    def write(self, folder: Path, batches: list[FeatureBatch]) -> None:
        rows = [pa.record_batch(columns, schema=self.schema) for columns in _rows(batches)]
        datasets.Dataset(pa.Table.from_batches(rows)).save_to_disk(folder / "d")

    def open(self, folder: Path) -> Any:
        return datasets.load_from_disk(folder / "d").with_format("arrow")

    def get(self, opened: Any, index: int) -> Tensor:
        return tensor_of(opened[index].column("features").combine_chunks().values)


class TorchSave(Layout):
    """A file a sample, as peers do."""

    def write(self, folder: Path, batches: list[FeatureBatch]) -> None:
        rows = (row for batch in batches for row in batch.rows())
        for i, (sample, features) in enumerate(rows):
            torch.save(
                {"input_ids": torch.tensor(sample.input_ids), "features": features.clone()},
                folder / f"{i}.pt",
            )

    def open(self, folder: Path) -> Path:
        return folder

    def get(self, opened: Path, index: int) -> Tensor:
        return torch.load(opened / f"{index}.pt", weights_only=True)["features"]


def _rows(batches: list[FeatureBatch]) -> Iterator[list[pa.Array]]:
    """A sample's columns."""
    for batch in batches:
        for sample, features in batch.rows():
            bits = features.reshape(-1).view(torch.uint16).numpy()
            yield [
                pa.array([sample.id]),
                pa.array([sample.domain]),
                pa.array([np.asarray(sample.input_ids, dtype=np.int32)], pa.list_(pa.int32())),
                pa.array([np.ones(len(sample.input_ids), dtype=bool)], pa.list_(pa.bool_())),
                pa.LargeListArray.from_arrays(pa.array([0, bits.size], pa.int64()), pa.array(bits)),
            ]


def measure(layout: Layout, batches: list[FeatureBatch], scratch: Path, num_bytes: int) -> dict[str, float]:
    """One layout, from writing to reading at random."""
    folder = scratch / "layout"
    count = sum(len(batch.samples) for batch in batches)
    written = min(_write(layout, folder, batches) for _ in range(3))
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    _drop(folder)
    cold = _read_all(layout, folder, count)
    warm = min(_read_all(layout, folder, count) for _ in range(2))
    chosen = random.Random(0).sample(range(count), 64)
    result = {
        "write_mb_s": num_bytes / written / 1e6,
        "read_cold_mb_s": num_bytes / cold / 1e6,
        "read_warm_mb_s": num_bytes / warm / 1e6,
        "sample_warm_ms": _read_some(layout, folder, chosen, cold=False),
        "sample_cold_ms": _read_some(layout, folder, chosen[:16], cold=True),
        "size_ratio": size / num_bytes,
    }
    shutil.rmtree(folder)
    return {name: round(value, 4) for name, value in result.items()}


def _write(layout: Layout, folder: Path, batches: list[FeatureBatch]) -> float:
    """Seconds; what was written before is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    began = time.perf_counter()
    layout.write(folder, batches)
    _sync(folder)
    return time.perf_counter() - began


def _read_all(layout: Layout, folder: Path, count: int) -> float:
    began = time.perf_counter()
    opened = layout.open(folder)
    for index in range(count):
        _touch(layout.get(opened, index))
    return time.perf_counter() - began


def _read_some(layout: Layout, folder: Path, chosen: list[int], *, cold: bool) -> float:
    """Median milliseconds of one sample, the shard being open."""
    times = []
    opened = layout.open(folder)
    for index in chosen:
        if cold:
            opened = None
            _drop(folder)
            opened = layout.open(folder)
        began = time.perf_counter()
        _touch(layout.get(opened, index))
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def _touch(features: Tensor) -> None:
    """Look at every number."""
    torch.aminmax(features.view(torch.int16))


def _sync(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _drop(folder: Path) -> None:
    """Ask the kernel to forget the files' pages (it does where nobody has them mapped)."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opening(scratch: Path, count: int = 200_000) -> dict[str, dict[str, float]]:
    """20 samples a record batch, as ours are written, or one; held open, or looked up when asked for."""
    found = {}
    write_shard(scratch / "small.arrow", FeatureMeta("0" * 64, (0,), 8), _short(20, 20))
    for name, per_batch in {"20 samples a record batch": 20, "1 sample a record batch": 1}.items():
        path = scratch / f"{per_batch}.arrow"
        meta = FeatureMeta("0" * 64, (0,), 8)
        write_shard(path, meta, _short(count, per_batch))
        for way in _WAYS:
            # Each in a process of its own, which has no freed memory to use again.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[f"{name}, {way}"] = pool.apply(_opened, (path, way, count))
    return found


def _opened(path: Path, way: str, count: int) -> dict[str, float]:
    _WAYS[way](path.with_name("small.arrow"))  # what the first call ever costs
    before = _anonymous_mb()
    began = time.perf_counter()
    kept, lengths = _WAYS[way](path)
    seconds = time.perf_counter() - began
    assert len(lengths) == count
    del lengths
    memory = _anonymous_mb() - before
    del kept
    return {"seconds": round(seconds, 3), "memory_mb": round(memory, 1)}


def _short(count: int, per_batch: int) -> Iterator[FeatureBatch]:
    features = torch.zeros(per_batch * 64, 1, 8, dtype=torch.bfloat16)
    for start in range(0, count, per_batch):
        names = range(start, start + per_batch)
        yield FeatureBatch([Sample(str(i), "math", tuple(range(64)), ((9, 64),)) for i in names], features)


def _lengths_of_shard(path: Path) -> tuple[Any, list[int]]:
    shard = FeatureShard(path)
    return shard, shard.lengths()


def _lengths_of_list(path: Path) -> tuple[Any, list[int]]:
    held = list(pa.ipc.open_stream(pa.memory_map(str(path))))
    lengths = [n for batch in held for n in batch.column("input_ids").value_lengths().to_pylist()]
    return held, lengths


_WAYS: dict[str, Any] = {
    "FeatureShard": _lengths_of_shard,
    "a list of record batches": _lengths_of_list,
}


def _anonymous_mb() -> float:
    """Resident memory that is no file's, in MB."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text[text.index("RssAnon:") :].split()[1]) / 1024


def _batches(options: argparse.Namespace, meta: FeatureMeta) -> list[FeatureBatch]:
    """Real features, repeated until they fill the megabytes asked for."""
    target = load_target(options.target)
    samples = read_samples(options.target, options.prompts, options.tokens)
    made = list(extract(target, samples, meta, batch_tokens=4096))
    num_bytes = sum(b.features.numel() * 2 for b in made)
    copies = max(1, round(options.megabytes * 1e6 / num_bytes))
    return [
        FeatureBatch(
            [Sample(f"{copy}-{s.id}", s.domain, s.input_ids, s.spans) for s in b.samples], b.features
        )
        for copy in range(copies)
        for b in made
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=12_000, help="tokens that the target really reads")
    parser.add_argument("--megabytes", type=int, default=384)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 8, 14, 20, 27])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    hidden = json.loads((options.target / "config.json").read_text())["hidden_size"]

    def meta(storage: Storage) -> FeatureMeta:
        return FeatureMeta("0" * 64, tuple(options.layers), hidden, storage)

    batches = _batches(options, meta("bf16"))
    layouts: dict[str, Layout] = {
        "ours: Arrow stream, a record batch a forward pass": Ours(meta("bf16")),
        "ours, compact (float8)": Ours(meta("compact")),
        "Arrow stream, a record batch a sample": Arrow(meta("bf16"), "stream", None),
        "Arrow stream, lz4": Arrow(meta("bf16"), "stream", "lz4"),
        "Arrow stream, zstd": Arrow(meta("bf16"), "stream", "zstd"),
        "Arrow file": Arrow(meta("bf16"), "file", None),
        "Parquet": Parquet(meta("bf16"), "none"),
        "Parquet, zstd": Parquet(meta("bf16"), "zstd"),
        "safetensors": Safetensors(),
        "datasets.save_to_disk": SaveToDisk(meta("bf16")),
        "torch.save, a file a sample": TorchSave(),
    }
    num_bytes = sum(b.features.numel() * 2 for b in batches)
    datasets.disable_progress_bars()
    rows = {}
    with tempfile.TemporaryDirectory(dir=options.out.parent if options.out else None) as scratch:
        for name, layout in layouts.items():
            rows[name] = measure(layout, batches, Path(scratch), num_bytes)
            print(name, rows[name], flush=True)
        opened = opening(Path(scratch))
        print(opened)
    result = {
        "command": "python benchmarks/feature_storage.py TARGET PROMPTS.jsonl",
        "machine": describe(),
        "data": {
            "samples": sum(len(b.samples) for b in batches),
            "tokens": sum(b.features.shape[0] for b in batches),
            "taps": len(options.layers),
            "hidden": hidden,
            "megabytes": round(num_bytes / 1e6),
        },
        "layouts": rows,
        "opening_200000_samples": opened,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
