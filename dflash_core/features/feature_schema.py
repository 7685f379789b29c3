"""Feature shards' format: plain Arrow columns, and what the schema's metadata says of them.

A shard is one Arrow IPC *stream* (uncompressed), readable with nothing but pyarrow and by
`datasets.Dataset.from_file`. One row a sample; a record batch holds the samples of one forward pass.

| column | Arrow type | what |
|---|---|---|
| id, domain | string | the sample's |
| input_ids | list<int32> | [tokens] prompt and response as serving renders them |
| loss_mask | list<bool> | [tokens] true where the target itself spoke |
| features | large_list<uint16> | [tokens, taps, hidden] outputs of the tapped layers: bfloat16 bit patterns |
| last_hidden | large_list<uint16> | optional: [tokens, hidden] after the final norm, bfloat16 bit patterns |

With `storage` "compact", `features` is large_list<uint8> (float8_e4m3fn bit patterns) and a column
`feature_scales`, large_list<uint8> [tokens, taps], follows: value = float8 x 2^(scale - 127).

Lists are flat and row-major. The schema's metadata has one key, `dflash`: a JSON object with
`schema_version`, `target_fingerprint`, `layer_ids`, `hidden_size`, `storage`, `last_hidden` and, for
whoever reads without this package, `columns`: the shape and the number type of each flat column.

Hidden states are bfloat16 because float16 overflows on the outlier channels of real models; as
integers because Arrow has no bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa

Storage = Literal["bf16", "compact"]

SCHEMA_VERSION = 2
_KEY = b"dflash"


@dataclass(frozen=True)
class FeatureMeta:
    """What a shard's features are of; stands in the schema's metadata and is checked on reading."""

    target_fingerprint: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    storage: Storage = "bf16"
    last_hidden: bool = False
    schema_version: int = SCHEMA_VERSION

    @property
    def width(self) -> int:
        """Numbers per token: taps x hidden."""
        return len(self.layer_ids) * self.hidden_size


def arrow_schema(meta: FeatureMeta) -> pa.Schema:
    """The columns of a shard, and `meta` as its metadata."""
    compact = meta.storage == "compact"
    fields = [
        ("id", pa.string()),
        ("domain", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("features", pa.large_list(pa.uint8() if compact else pa.uint16())),
    ]
    if compact:
        fields.append(("feature_scales", pa.large_list(pa.uint8())))
    if meta.last_hidden:
        fields.append(("last_hidden", pa.large_list(pa.uint16())))
    described = {**asdict(meta), "columns": _columns(meta)}
    return pa.schema(fields).with_metadata({_KEY: json.dumps(described).encode()})


def parse_schema(schema: pa.Schema) -> FeatureMeta:
    """What `arrow_schema` wrote. Raises ValueError for anything else, also for another version."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        raise ValueError("it has no dflash metadata")
    found = json.loads(text)
    version = found.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ValueError(f"it has feature schema {version}, this version reads {SCHEMA_VERSION}")
    found.pop("columns", None)
    try:
        meta = FeatureMeta(**{**found, "layer_ids": tuple(found["layer_ids"])})
    except (KeyError, TypeError) as error:
        raise ValueError(f"its dflash metadata is not ours ({error})") from None
    if not schema.equals(arrow_schema(meta)):
        raise ValueError("its columns are not those that its metadata tells of")
    return meta


def _columns(meta: FeatureMeta) -> dict[str, Any]:
    taps, hidden = len(meta.layer_ids), meta.hidden_size
    compact = meta.storage == "compact"
    columns = {
        "features": {
            "shape": ["tokens", taps, hidden],
            "type": "float8_e4m3fn" if compact else "bfloat16",
        }
    }
    if compact:
        columns["feature_scales"] = {"shape": ["tokens", taps], "type": "exponent of 2, plus 127"}
    if meta.last_hidden:
        columns["last_hidden"] = {"shape": ["tokens", hidden], "type": "bfloat16"}
    return columns
