"""Reads what the pages show from MLflow.

Read only. A database that does not exist is an empty registry, and is not made by looking at it.
"""

from __future__ import annotations

import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from dashboards.model import Decision, Family, Version
from dflash_core import tags as t
from dflash_core.errors import UserError
from dflash_core.tracking import (
    display_uri,
    probe_tracking,
    quiet_mlflow,
    resolve_tracking_uri,
    sqlite_path,
)
from dflash_core.types import Interval

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.tracking import MlflowClient

NUM_DECISIONS = 100
NUM_VERSIONS = 200
NUM_FAMILIES = 100
PROBE_SECONDS = 2.0
"""A page waits this long for a server before it says that there is none."""

_RUN_ID = re.compile(r"[0-9a-f]{32}")


class UnavailableError(Exception):
    """MLflow cannot be asked just now; `str()` says why and what to do."""


class Source:
    """Everything the pages know, from one tracking URI."""

    def __init__(self, tracking_uri: str) -> None:
        """Raises UserError for a URI that no registry can be at; if one is there is asked page by page."""
        self.uri = resolve_tracking_uri(tracking_uri)
        self.shown_uri = display_uri(self.uri)
        database = sqlite_path(self.uri)
        if database is not None and not database.parent.is_dir():
            raise UserError(f"{database.parent} does not exist, so no database is in it: pass --tracking-uri")
        self._lock = Lock()

    def families(self) -> tuple[Family, ...]:
        """All families, the last active one first."""
        if self._missing:
            return ()
        with self._reading() as client:
            models = client.search_registered_models(
                f"tags.`{t.SCHEMA}` = '{t.SCHEMA_VERSION}'", max_results=NUM_FAMILIES
            )
            found = [self._family(client, model) for model in models]
        epoch = datetime.fromtimestamp(0, UTC)
        return tuple(sorted(found, key=lambda f: f.decisions[0].at if f.decisions else epoch, reverse=True))

    def family(self, name: str) -> Family | None:
        if self._missing:
            return None
        from mlflow.exceptions import MlflowException

        with self._reading() as client:
            try:
                model = client.get_registered_model(name)
            except MlflowException as error:
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return None
                raise
            return self._family(client, model) if t.SCHEMA in model.tags else None

    def acceptance(self, run_id: str) -> dict[str, list[float]]:
        """Acceptance rate at positions 1, 2, … of candidate and champion, as far as there are any."""
        with self._reading() as client:
            curves = {}
            for name in (t.ACCEPTANCE_CANDIDATE, t.ACCEPTANCE_CHAMPION):
                points = sorted((p.step, p.value) for p in client.get_metric_history(run_id, name))
                if points:
                    curves[name] = [value for _, value in points]
            return curves

    def report(self, run_id: str) -> bytes | None:
        """The report of one of our runs; None if there is none."""
        if self._missing or not _RUN_ID.fullmatch(run_id):
            return None
        from mlflow.exceptions import MlflowException

        with self._reading() as client, tempfile.TemporaryDirectory() as scratch:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                    return None
                raise
            files = {file.path for file in client.list_artifacts(run_id, t.REPORT_DIR)}
            if t.OUTCOME not in run.data.tags or t.REPORT_HTML not in files:
                return None
            return Path(client.download_artifacts(run_id, t.REPORT_HTML, scratch)).read_bytes()

    # ---- the parts -----------------------------------------------------------------------------------------

    @property
    def _missing(self) -> bool:
        path = sqlite_path(self.uri)
        return path is not None and not path.exists()

    @cached_property
    def _client(self) -> MlflowClient:
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @contextmanager
    def _reading(self) -> Iterator[MlflowClient]:
        """The client, if MLflow answers; what fails then is told as UnavailableError."""
        try:
            probe_tracking(self.uri, PROBE_SECONDS)
        except UserError as error:
            raise UnavailableError(str(error)) from error
        quiet_mlflow()
        from mlflow.exceptions import MlflowException

        try:
            with self._lock:  # opened once: a client is expensive, and pages are read in parallel
                client = self._client
            yield client
        except MlflowException as error:
            first_line = str(error).strip().splitlines()[0][:300]
            raise UnavailableError(f"MLflow at {self.shown_uri} failed: {first_line}") from error

    def _family(self, client: MlflowClient, model: RegisteredModel) -> Family:
        aliases: dict[int, list[str]] = {}
        for alias, number in model.aliases.items():
            aliases.setdefault(int(number), []).append(alias)
        versions = client.search_model_versions(
            f"name = '{model.name}'", max_results=NUM_VERSIONS, order_by=["version_number DESC"]
        )
        experiment = client.get_experiment_by_name(model.name)
        runs = (
            client.search_runs(
                [experiment.experiment_id],
                "attributes.status = 'FINISHED'",
                max_results=NUM_DECISIONS,
                order_by=["attributes.end_time DESC"],
            )
            if experiment is not None
            else []
        )
        return Family(
            name=model.name,
            versions=tuple(
                _version(found, aliases.get(int(found.version), []))
                for found in versions
                if t.DRAFTER_FINGERPRINT in found.tags
            ),
            decisions=tuple(_decision(run, model.name) for run in runs if t.OUTCOME in run.data.tags),
        )


def _decision(run: Run, family: str) -> Decision:
    tags, metrics = run.data.tags, run.data.metrics
    return Decision(
        run_id=run.info.run_id,
        family=family,
        outcome=tags[t.OUTCOME],
        reason=tags.get(t.REASON, ""),
        target_fingerprint=tags.get(t.TARGET_FINGERPRINT, ""),
        target_path=tags.get(t.TARGET_PATH, ""),
        at=_moment(run.info.end_time or run.info.start_time),
        seconds=sum(value for name, value in metrics.items() if name.startswith(t.STAGE_SECONDS_PREFIX)),
        champion=t.interval_from(metrics, t.TAU_CHAMPION),
        candidate=t.interval_from(metrics, t.TAU_CANDIDATE),
        champion_version=tags.get(t.CHAMPION_VERSION, ""),
        drafter_version=tags.get(t.DRAFTER_VERSION, ""),
    )


def _version(found: ModelVersion, aliases: list[str]) -> Version:
    tags = found.tags
    return Version(
        number=int(found.version),
        aliases=tuple(sorted(aliases)),
        drafter_fingerprint=tags[t.DRAFTER_FINGERPRINT],
        block_size=tags.get(t.BLOCK_SIZE, ""),
        parent=tags.get(t.PARENT_VERSION, ""),
        target_fingerprint=tags.get(t.TARGET_FINGERPRINT, ""),
        target_path=tags.get(t.TARGET_PATH, ""),
        tau=_tau(tags),
        outcome=tags.get(t.OUTCOME, ""),
        created=_moment(found.creation_timestamp),
        run_id=found.run_id or "",
        serves=t.serve_entries(tags),
    )


def _tau(tags: Mapping[str, str]) -> Interval | None:
    try:
        numbers = [float(tags[key]) for key in (t.TAU, t.TAU_LOW, t.TAU_HIGH)]
    except (KeyError, ValueError):
        return None
    return Interval(*numbers) if all(map(math.isfinite, numbers)) else None


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
