"""Traces in shards, all turns of a conversation in one of them; streamed, whatever their order."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dflash_core.corpus.trace_rows import trace_row
from dflash_core.prompts.overlap import conversation_hash
from dflash_core.types import Trace

SHARD_TRACES = 256
"""About so many in a shard: its conversation decides which one a trace goes to."""
_HELD = 4096
"""Rows in memory before they are appended to their shards."""


def write_trace_shards(folder: Path, traces: Iterable[Trace], total: int) -> list[str]:
    """Write `traces-NNNNN.jsonl` files into `folder`, which has none; returns their names."""
    number_of_shards = max(1, -(-total // SHARD_TRACES))
    held: dict[str, list[str]] = defaultdict(list)
    names: set[str] = set()
    for count, trace in enumerate(traces, start=1):
        name = f"traces-{conversation_hash(trace) % number_of_shards:05d}.jsonl"
        held[name].append(json.dumps(trace_row(trace), ensure_ascii=False) + "\n")
        if not count % _HELD:
            names |= _append(folder, held)
    names |= _append(folder, held)
    return sorted(names)


def _append(folder: Path, held: dict[str, list[str]]) -> set[str]:
    names = set(held)
    for name, rows in held.items():
        with (folder / name).open("a", encoding="utf-8", newline="\n") as stream:
            stream.writelines(rows)
    held.clear()
    return names
