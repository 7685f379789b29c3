"""Feature shards: what goes in comes out, without a copy, for us, for pyarrow alone and for datasets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from dflash_core.errors import UserError
from dflash_core.features.compact import decode, encode
from dflash_core.features.feature_check import check_shard
from dflash_core.features.feature_schema import FeatureMeta
from dflash_core.features.feature_shards import FeatureSet, FeatureShard
from dflash_core.features.feature_writer import FeatureBatch, write_shard
from dflash_core.types import Sample

META = FeatureMeta("a" * 64, (1, 4, 2), 8)


def _samples(lengths: tuple[int, ...] = (3, 9, 9, 14, 40)) -> list[Sample]:
    return [
        Sample(f"s{i}", "math", tuple(range(i, i + n)), ((1, 2), (3, n)) if n > 3 else ((1, 3),))
        for i, n in enumerate(lengths)
    ]


def _batch(samples: list[Sample], meta: FeatureMeta = META, seed: int = 0) -> FeatureBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(len(s.input_ids) for s in samples)
    features = torch.randn(tokens, len(meta.layer_ids), meta.hidden_size, generator=generator)
    last = torch.randn(tokens, meta.hidden_size, generator=generator) if meta.last_hidden else None
    return FeatureBatch(
        samples, features.to(torch.bfloat16), None if last is None else last.to(torch.bfloat16)
    )


def _written(path: Path, samples: list[Sample], meta: FeatureMeta = META) -> list[FeatureBatch]:
    batches = [_batch(samples[:3], meta, seed=1), _batch(samples[3:], meta, seed=2)]
    assert write_shard(path, meta, batches) == sum(len(s.input_ids) for s in samples)
    return batches


def _per_sample(batches: list[FeatureBatch], part: str) -> list[Tensor]:
    return [
        piece
        for batch in batches
        for piece in getattr(batch, part).split([len(s.input_ids) for s in batch.samples])
    ]


@pytest.mark.parametrize("storage", ["bf16", "compact"])
@pytest.mark.parametrize("last_hidden", [False, True])
def test_rows_come_back_as_they_went_in(tmp_path: Path, storage: str, last_hidden: bool) -> None:
    meta = replace(META, storage=storage, last_hidden=last_hidden)
    samples = _samples()
    batches = _written(tmp_path / "s.arrow", samples, meta)
    shard = FeatureShard(tmp_path / "s.arrow")
    assert shard.meta == meta
    assert shard.lengths() == [3, 9, 9, 14, 40]
    assert shard.longest_span() == 37
    check_shard(tmp_path / "s.arrow", meta, samples)
    features = _per_sample(batches, "features")
    if storage == "compact":
        features = [decode(*encode(f)) for f in features]
    for i, sample in enumerate(samples):
        row = shard[i]
        assert (row.id, row.domain) == (sample.id, sample.domain)
        assert row.input_ids.tolist() == list(sample.input_ids)
        spoken = {p for start, end in sample.spans for p in range(start, end)}
        assert row.loss_mask.tolist() == [p in spoken for p in range(len(sample.input_ids))]
        assert row.features.dtype == torch.bfloat16
        assert torch.equal(row.features, features[i].flatten(1))
        if last_hidden:
            assert row.last_hidden is not None
            assert torch.equal(row.last_hidden, _per_sample(batches, "last_hidden")[i])
        else:
            assert row.last_hidden is None
    with pytest.raises(IndexError):
        shard[5]


def test_the_same_batches_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _written(tmp_path / name, _samples())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def _mappings(path: Path) -> list[range]:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return [range(int(low, 16), int(high, 16)) for low, high in spans]


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    meta = replace(META, last_hidden=True)
    _written(path, _samples(), meta)
    shard = FeatureShard(path)
    mapped = _mappings(path)
    assert mapped
    for row in (shard[i] for i in range(len(shard))):
        assert row.last_hidden is not None
        for tensor in (row.features, row.last_hidden, row.input_ids):
            assert any(tensor.data_ptr() in span for span in mapped)


def test_reading_one_row_of_a_large_shard_leaves_the_others_on_disk(tmp_path: Path) -> None:
    """Resident pages of the mapping, by the kernel's own count."""
    meta = FeatureMeta("a" * 64, (0, 1), 512)
    samples = [Sample(str(i), "d", tuple(range(1024)), ((1, 9),)) for i in range(32)]
    path = tmp_path / "s.arrow"
    write_shard(path, meta, (_batch([s], meta) for s in samples))
    shard = FeatureShard(path)
    row = shard[17]
    float(row.features.float().sum())

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text(encoding="ascii")
        entry = text[text.index(str(path)) :]
        return int(entry[entry.index("Rss:") :].split()[1]) * 1024

    # A row is 2 MiB; the kernel maps up to 64 KiB around every page that is touched.
    assert path.stat().st_size > 64 << 20
    assert resident() < (2 << 20) + 3 * len(samples) * (64 << 10)


@pytest.mark.parametrize("storage", ["bf16", "compact"])
def test_a_shard_is_readable_with_pyarrow_alone(tmp_path: Path, storage: str) -> None:
    meta = replace(META, storage=storage, last_hidden=True)
    samples = _samples()
    batches = _written(tmp_path / "s.arrow", samples, meta)
    table = pa.ipc.open_stream(pa.memory_map(str(tmp_path / "s.arrow"))).read_all()
    told = json.loads(table.schema.metadata[b"dflash"])
    assert told["schema_version"] == 2
    assert told["columns"]["features"]["shape"] == ["tokens", 3, 8]
    for i, sample in enumerate(samples):
        row = table.slice(i, 1).to_pylist()[0]
        assert row["input_ids"] == list(sample.input_ids)
        stored = np.array(row["features"]).reshape(-1, *told["columns"]["features"]["shape"][1:])
        expected = _per_sample(batches, "features")[i].float().numpy()
        if storage == "bf16":
            assert told["columns"]["features"]["type"] == "bfloat16"
            assert np.array_equal((stored.astype(np.uint32) << 16).view(np.float32), expected)
        else:
            scales = np.array(row["feature_scales"]).reshape(
                -1, *told["columns"]["feature_scales"]["shape"][1:]
            )
            values = _float8(stored) * 2.0 ** (scales.astype(int) - 127)[..., None]
            assert np.abs(values - expected).max() <= np.abs(expected).max() / 16
        last = np.array(row["last_hidden"], dtype=np.uint32).reshape(-1, 8) << 16
        assert np.array_equal(last.view(np.float32), _per_sample(batches, "last_hidden")[i].float().numpy())


def _float8(codes: np.ndarray) -> np.ndarray:
    """float8_e4m3fn by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 128, -size, size)


@pytest.mark.parametrize("storage", ["bf16", "compact"])
def test_a_shard_is_what_datasets_reads(tmp_path: Path, storage: str) -> None:
    samples = _samples()
    meta = replace(META, storage=storage)
    _written(tmp_path / "s.arrow", samples, meta)
    dataset = datasets.Dataset.from_file(str(tmp_path / "s.arrow"))
    scales = ["feature_scales"] if storage == "compact" else []
    assert dataset.column_names == ["id", "domain", "input_ids", "loss_mask", "features", *scales]
    assert [s for s, spoken in enumerate(dataset[3]["loss_mask"]) if spoken] == [1, *range(3, 14)]
    assert dataset[3]["input_ids"] == list(samples[3].input_ids)
    assert len(dataset[3]["features"]) == 14 * meta.width


def test_shards_of_different_targets_do_not_mix(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.arrow", "b.arrow")]
    for path in paths:
        _written(path, _samples(), replace(META, target_fingerprint=path.stem * 64))
    with pytest.raises(UserError, match=r"b\.arrow"):
        FeatureSet(paths)
    assert len(FeatureSet(paths[:1])) == 5


def test_a_set_counts_its_rows_and_finds_them_across_shards(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.arrow", "b.arrow")]
    for path, lengths in zip(paths, ((3, 9, 9, 14), (5, 6, 7, 8)), strict=True):
        _written(path, _samples(lengths))
    rows = FeatureSet(paths, [4, 4])
    assert rows.lengths() == [3, 9, 9, 14, 5, 6, 7, 8]
    assert [len(row.input_ids) for row in rows] == rows.lengths()
    with pytest.raises(UserError, match=r"b\.arrow has 4 of 5 samples"):
        FeatureSet(paths, [4, 5])


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    _written(path, _samples())
    data = path.read_bytes()
    for cut in (0, 4, 10, len(data) // 2, len(data) - 20, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError, match=r"s\.arrow"):
            FeatureShard(path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    _written(path, _samples(), replace(META, schema_version=1))
    with pytest.raises(UserError, match="schema 1, this version reads 2"):
        FeatureShard(path)


def test_a_shard_that_is_not_what_was_meant_is_refused(tmp_path: Path) -> None:
    path, samples = tmp_path / "s.arrow", _samples()
    _written(path, samples)
    others = {
        "has 5 of 4 samples": samples[:4],
        "token ids of sample 's1'": [samples[0], replace(samples[1], input_ids=(0,) * 9), *samples[2:]],
        "loss mask of sample 's4'": [*samples[:4], replace(samples[4], spans=((1, 2),))],
        "domain of sample 's2'": [*samples[:2], replace(samples[2], domain="code"), *samples[3:]],
        "are others": [samples[1], samples[0], *samples[2:]],
    }
    for words, meant in others.items():
        with pytest.raises(UserError, match=words):
            check_shard(path, META, meant)
    with pytest.raises(UserError, match="not of"):
        check_shard(path, replace(META, layer_ids=(1, 4, 3)), samples)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_bad_number_that_was_written_is_found_with_sample_and_layer(tmp_path: Path, bad: float) -> None:
    samples = _samples()
    batch = _batch(samples)
    batch.features[3 + 9 + 2, 1, 5] = bad
    write_shard(tmp_path / "s.arrow", META, [batch])
    with pytest.raises(UserError, match="sample 's2' has NaN or infinity after layer 4"):
        check_shard(tmp_path / "s.arrow", META, samples)


def test_compact_numbers_are_close_and_the_scale_is_exact() -> None:
    """Each number to 1/16 of itself, or to half the smallest step under the vector's largest."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 3, 96, generator=generator).to(torch.bfloat16)
    values[:, :, 7] *= 4096  # the outliers of real models
    values[5] = 0
    values[6, 0] = 1e-30
    values[7, 1] = 1e30
    codes, scales = encode(values)
    assert codes.shape == values.shape and scales.shape == values.shape[:-1]
    error = (decode(codes, scales).float() - values.float()).abs()
    largest = values.float().abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(values.float().abs() / 16, largest / 224 * 2.0**-10)).all()
    assert torch.equal(decode(*encode(decode(codes, scales))), decode(codes, scales))


@pytest.mark.parametrize("hidden", [64, 128, 576])
def test_bytes_on_disk_are_the_numbers_and_little_else(tmp_path: Path, hidden: int) -> None:
    samples = [Sample(str(i), "math", tuple(range(300)), ((9, 300),)) for i in range(16)]
    sizes = {}
    for storage in ("bf16", "compact"):
        meta = FeatureMeta("a" * 64, (0, 1, 2, 3, 4), hidden, storage)  # type: ignore[arg-type]
        write_shard(tmp_path / storage, meta, [_batch(samples[:8], meta), _batch(samples[8:], meta)])
        sizes[storage] = (tmp_path / storage).stat().st_size
    numbers = 16 * 300 * 5 * hidden * 2
    assert sizes["bf16"] <= 1.02 * numbers
    assert sizes["compact"] <= 0.53 * sizes["bf16"]
