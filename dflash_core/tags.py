"""Names of the registry's schema: aliases, tags, metrics and artifacts, and how they are spelled.

`pipelines.registry` writes them, `dashboards` reads them, and neither knows the other; this file is what they
share. Nothing here talks to MLflow.

One registered model per target family, one version per drafter. Which drafter serves a target is said by the
alias `target_alias(fingerprint)` *and* by the version's tag `serves_tag(fingerprint)`, which holds the whole
fingerprint: an alias has room for 48 bits of it only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypedDict, cast

from dflash_core.fingerprint import SHORT
from dflash_core.types import Interval

# Aliases of a registered model.
CHAMPION = "champion"
CHALLENGER = "challenger"
"""A held candidate, waiting for a person."""
PREVIOUS = "previous"
TARGET_PREFIX = "target-"

# Tag of a registered model: marks it as ours among all others on the server.
SCHEMA = "dflash.schema"
SCHEMA_VERSION = "1"

# Tags of a version, of a run, or of both.
DRAFTER_FINGERPRINT = "dflash.drafter_fingerprint"
BLOCK_SIZE = "dflash.block_size"
PARENT_VERSION = "dflash.parent_version"
TARGET_FINGERPRINT = "dflash.target_fingerprint"
TARGET_PATH = "dflash.target_path"
CORPUS_FINGERPRINT = "dflash.corpus_fingerprint"
FEATURES_FINGERPRINT = "dflash.features_fingerprint"
CONFIG_FINGERPRINT = "dflash.config_fingerprint"
GIT_SHA = "dflash.git_sha"
TAU = "dflash.tau"
TAU_LOW = "dflash.tau_low"
TAU_HIGH = "dflash.tau_high"
GATE = "dflash.gate"
OUTCOME = "dflash.outcome"
JOB_IDENTITY = "dflash.job_identity"
MODEL_ID = "dflash.model_id"
RUN_ID = "dflash.run_id"
FILES = "dflash.files"
"""JSON: path inside the drafter's directory -> sha256."""
FILES_FINGERPRINT = "dflash.files_fingerprint"
SERVES_PREFIX = "dflash.serves."
DRAFTER_VERSION = "dflash.drafter_version"
CHAMPION_VERSION = "dflash.champion_version"
VERDICT = "dflash.verdict"
REASON = "dflash.reason"

# Metrics of a run. The intervals add LOW and HIGH; the acceptance metrics have step = position k, from 1.
TAU_CANDIDATE = "tau.candidate"
TAU_CHAMPION = "tau.champion"
LOW = ".low"
HIGH = ".high"
STAGE_SECONDS_PREFIX = "stage_seconds."
TRAIN_PREFIX = "train."
"""Of the training's curves, by step: loss, proxy_tau, held_out_tau, ..."""
TAU_HELD_OUT = "tau.held_out"
"""The candidate's, on answers held out of its training."""
ACCEPTANCE_CANDIDATE = "acceptance.candidate"
ACCEPTANCE_CHAMPION = "acceptance.champion"

# Artifacts of a run.
REPORT_DIR = "report"
REPORT_HTML = "report/report.html"

_SHA256 = re.compile(r"[0-9a-f]{64}")


class ServeEntry(TypedDict):
    """That a drafter was measured on a target and serves it; the value of a `dflash.serves.*` tag."""

    target_fingerprint: str
    target_path: str
    tau: float
    tau_low: float
    tau_high: float
    outcome: str
    job_identity: str
    run_id: str
    at: str
    """ISO 8601, UTC."""


def _short(fingerprint: str) -> str:
    if not _SHA256.fullmatch(fingerprint):
        raise ValueError(f"{fingerprint!r} is not a sha256 in hex")
    return fingerprint[:SHORT]


def target_alias(fingerprint: str) -> str:
    """The alias under which the drafter that serves this target is found."""
    return TARGET_PREFIX + _short(fingerprint)


def serves_tag(fingerprint: str) -> str:
    """The version tag that records that a drafter serves this target."""
    return SERVES_PREFIX + _short(fingerprint)


def format_serve_entry(entry: ServeEntry) -> str:
    """`entry` as a tag's text. Raises ValueError if a key is missing or unknown."""
    if set(entry) != set(ServeEntry.__annotations__):
        wanted = sorted(ServeEntry.__annotations__)
        raise ValueError(f"a serve entry has the keys {wanted}, not {sorted(entry)}")
    _short(entry["target_fingerprint"])
    return json.dumps(entry, sort_keys=True, ensure_ascii=False)


def parse_serve_entry(text: str) -> ServeEntry | None:
    """The entry in a tag's text; None if a foreign hand left something else there."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not set(ServeEntry.__annotations__) <= set(value):
        return None
    kinds = {"tau": (int, float), "tau_low": (int, float), "tau_high": (int, float)}
    if not all(isinstance(value[key], kinds.get(key, str)) for key in ServeEntry.__annotations__):
        return None
    return cast("ServeEntry", value)


def promise_tags(entry: ServeEntry) -> dict[str, str]:
    """A version's own tags that say how it was promoted, and with which τ: what it promises from then on."""
    return {
        TAU: repr(entry["tau"]),
        TAU_LOW: repr(entry["tau_low"]),
        TAU_HIGH: repr(entry["tau_high"]),
        OUTCOME: entry["outcome"],
        JOB_IDENTITY: entry["job_identity"],
    }


def serve_entries(tags: Mapping[str, str]) -> dict[str, ServeEntry]:
    """Whole target fingerprint -> entry, from a version's tags."""
    parsed = (parse_serve_entry(text) for key, text in tags.items() if key.startswith(SERVES_PREFIX))
    return {entry["target_fingerprint"]: entry for entry in parsed if entry is not None}


def interval_metrics(name: str, interval: Interval) -> dict[str, float]:
    """The three metrics that record `interval` under `name`."""
    return {name: interval.estimate, name + LOW: interval.low, name + HIGH: interval.high}


def interval_from(values: Mapping[str, float], name: str) -> Interval | None:
    """The interval recorded under `name`; None unless all three numbers are there and finite."""
    numbers = [values.get(key, math.nan) for key in (name, name + LOW, name + HIGH)]
    return Interval(*numbers) if all(math.isfinite(number) for number in numbers) else None


def utc_now() -> str:
    """The present moment as the tags spell it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
