"""MLflow as the system of record: which drafters there are, which serves which target, and what happened.

`Registry` is the only writer. Every method may be repeated after a crash at any point and ends in the same
state. Moving aliases is last-writer-wins in MLflow, so whoever calls `promote`, `certify` or `hold` holds the
lease of the model (`Store.lease`) meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_core import tags as t
from dflash_core.errors import DFlashError, UserError
from dflash_core.fingerprint import fingerprint
from dflash_core.tags import ServeEntry
from dflash_core.tracking import probe_tracking, resolve_tracking_uri, sqlite_path
from dflash_core.types import Outcome
from pipelines.drafter_files import fetch_verified, hash_files
from pipelines.mlflow_client import global_tracking_uri, open_client, plain_errors
from pipelines.run_log import RunLog, RunRecord

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

_MODEL_NAME = re.compile(r"\w[\w.+ -]{0,199}")
_SOURCE = re.compile(r"models:/m-[0-9a-f]{32}")
"""The only kind of source that `register` writes, hence the only one that is fetched: a database that is
written to directly takes any (`file:///etc`)."""


class RegistryConflictError(DFlashError):
    """Another writer moved an alias while we did, which the lease is there to prevent."""


@dataclass(frozen=True)
class RegisteredDrafter:
    """A version of the registered model."""

    name: str
    version: int
    drafter_fingerprint: str
    block_size: int
    tags: Mapping[str, str]
    run_id: str
    aliases: tuple[str, ...]
    serves: Mapping[str, ServeEntry]
    """Whole target fingerprint -> how well it was found to serve it; the alias says whether it still does."""
    source: str


class Registry:
    """One registered model (a target family) and the experiment of the same name."""

    def __init__(self, tracking_uri: str, model_name: str) -> None:
        """Checks the name, and that MLflow is there, in milliseconds; MLflow is imported when first asked.

        Raises UserError for an illegal name, an unusable URI, a server or database that does not answer.
        """
        if not _MODEL_NAME.fullmatch(model_name):
            raise UserError(
                f"model name {model_name!r} cannot be registered; use at most 200 letters, digits, spaces "
                "and any of . _ + -, beginning with a letter or digit"
            )
        self.name = model_name
        self.tracking_uri = resolve_tracking_uri(tracking_uri)
        probe_tracking(self.tracking_uri)

    @cached_property
    def client(self) -> MlflowClient:
        return open_client(self.tracking_uri)

    # ---- looking -------------------------------------------------------------------------------------------

    def serving(self, target_fingerprint: str) -> RegisteredDrafter | None:
        """The drafter that serves this target; the alias must point at it and the whole fingerprint match."""
        found = self._by_alias(t.target_alias(target_fingerprint))
        return found if found is not None and target_fingerprint in found.serves else None

    def champion(self) -> RegisteredDrafter | None:
        return self._by_alias(t.CHAMPION)

    def parent_for(self, target_fingerprint: str) -> RegisteredDrafter | None:
        """What a new drafter for this target starts from: the one that serves it, else the champion."""
        return self.serving(target_fingerprint) or self.champion()

    def version(self, number: int) -> RegisteredDrafter:
        """Raises UserError if there is no such version, or it is none of ours."""
        from mlflow.exceptions import MlflowException

        with plain_errors(self.tracking_uri):
            try:
                return self._read(self.client.get_model_version(self.name, str(number)))
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise UserError(f"model {self.name} has no version {number}; pass one that it has") from error

    def find_by_drafter(self, drafter_fingerprint: str) -> RegisteredDrafter | None:
        """The version that holds this drafter, the oldest if a foreign hand registered it twice."""
        if self._database_missing:
            return None
        with plain_errors(self.tracking_uri):
            found = self.client.search_model_versions(
                f"name = '{self.name}' and tags.`{t.DRAFTER_FINGERPRINT}` = '{drafter_fingerprint}'"
            )
        # A search leaves the aliases out, so the version is read once more.
        return self.version(min(int(each.version) for each in found)) if found else None

    # ---- recording -----------------------------------------------------------------------------------------

    def log_run(
        self,
        *,
        tags: Mapping[str, str],
        params: Mapping[str, object],
        metrics: Mapping[str, float],
        step_metrics: Mapping[str, Mapping[int, float]],
        report_dir: Path | None = None,
    ) -> str:
        """Records one finished realignment as an MLflow run; its id. A rerun finds its run again.

        Job identity and outcome must be among `tags`; see `RunRecord` for the rest.
        """
        record = RunRecord(tags, params, metrics, step_metrics, report_dir)
        with plain_errors(self.tracking_uri):
            return self._runs.record(record)

    def register(self, drafter_dir: Path, run_id: str, tags: Mapping[str, str]) -> RegisteredDrafter:
        """Uploads the directory and makes it a version; a drafter that is registered already is found again.

        `tags` must hold `dflash.drafter_fingerprint` and `dflash.block_size`. The files' hashes, the run and
        the logged model's id are added, and the run is tagged with the version. No alias is touched: nothing
        serves yet.
        """
        known = self.find_by_drafter(tags[t.DRAFTER_FINGERPRINT])
        with plain_errors(self.tracking_uri):
            number = known.version if known else self._create_version(drafter_dir, run_id, tags)
            self.client.set_tag(run_id, t.DRAFTER_VERSION, str(number))
        return known or self.version(number)

    # ---- serving -------------------------------------------------------------------------------------------

    def promote(self, version: int, entry: ServeEntry) -> RegisteredDrafter:
        """Makes `version` the champion and what serves the entry's target.

        In this order: the tags, `previous` = the old champion, `champion`, the target's alias, and
        `challenger` goes if it was this version. Then all is read back; RegistryConflictError if it differs.
        """
        old = self.champion()
        with plain_errors(self.tracking_uri):
            self._record_serving(version, entry)
            # A held drafter that passes later was measured anew: its promise is the τ that it passed with.
            for tag, value in t.promise_tags(entry).items():
                self.client.set_model_version_tag(self.name, str(version), tag, value)
            if old is not None and old.version != version:
                self._set_alias(t.PREVIOUS, old.version)
            self._set_alias(t.CHAMPION, version)
            self._set_alias(t.target_alias(entry["target_fingerprint"]), version)
            challenger = self._by_alias(t.CHALLENGER)
            if challenger is not None and challenger.version == version:
                self.client.delete_registered_model_alias(self.name, t.CHALLENGER)
        return self._confirm(version, {t.CHAMPION}, entry)

    def interrupted_promotion(
        self, target_fingerprint: str, job_identity: str
    ) -> tuple[int, ServeEntry] | None:
        """Arguments that complete a promotion of this very job which was killed after `champion` had moved.

        Without it a rerun would take the half-promoted drafter for an old champion and measure it again.
        """
        champion = self.champion()
        entry = champion.serves.get(target_fingerprint) if champion else None
        if champion is None or entry is None or self.serving(target_fingerprint) is not None:
            return None
        if entry["job_identity"] != job_identity or entry["outcome"] != Outcome.PROMOTED:
            return None
        return champion.version, entry

    def certify(self, version: int, entry: ServeEntry) -> RegisteredDrafter:
        """Records that `version` serves the entry's target too; the champion stays who it is."""
        with plain_errors(self.tracking_uri):
            self._record_serving(version, entry)
            self._set_alias(t.target_alias(entry["target_fingerprint"]), version)
        return self._confirm(version, set(), entry)

    def hold(self, version: int) -> RegisteredDrafter:
        """Makes `version` the challenger: a candidate that waits for a person."""
        with plain_errors(self.tracking_uri):
            self._set_alias(t.CHALLENGER, version)
        return self._confirm(version, {t.CHALLENGER})

    def download(self, version: int, into: Path) -> Path:
        """Fetches a version's directory to `into`, compared file by file with the hashes of its registration.

        Raises UserError, and leaves nothing in `into`, if anything differs.
        """
        drafter = self.version(version)
        if not _SOURCE.fullmatch(drafter.source) or t.FILES not in drafter.tags:
            raise UserError(
                f"version {version} of {self.name} points at {drafter.source!r}, which was not registered "
                "here; serve another version"
            )

        def fetch(landing: Path) -> Path:
            import mlflow.artifacts

            with global_tracking_uri(self.tracking_uri):
                return Path(mlflow.artifacts.download_artifacts(drafter.source, dst_path=str(landing)))

        with plain_errors(self.tracking_uri):
            return fetch_verified(fetch, into, json.loads(drafter.tags[t.FILES]))

    # ---- the parts -----------------------------------------------------------------------------------------

    @property
    def _database_missing(self) -> bool:
        """Looking creates nothing: a database that is not there yet holds nothing."""
        path = sqlite_path(self.tracking_uri)
        return path is not None and not path.exists()

    @cached_property
    def _runs(self) -> RunLog:
        return RunLog(self.client, self.tracking_uri, self.name)

    def _by_alias(self, alias: str) -> RegisteredDrafter | None:
        if self._database_missing:
            return None
        from mlflow.exceptions import MlflowException

        with plain_errors(self.tracking_uri):
            try:
                return self._read(self.client.get_model_version_by_alias(self.name, alias))
            except MlflowException as error:
                # No such model; a model without this alias.
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return None
                raise

    def _read(self, found: ModelVersion) -> RegisteredDrafter:
        if t.DRAFTER_FINGERPRINT not in found.tags or not found.tags.get(t.BLOCK_SIZE, "").isdecimal():
            raise UserError(
                f"version {found.version} of model {self.name} is no drafter of ours (it lacks "
                f"{t.DRAFTER_FINGERPRINT} or {t.BLOCK_SIZE}); pass another --model-name"
            )
        return RegisteredDrafter(
            name=found.name,
            version=int(found.version),
            drafter_fingerprint=found.tags[t.DRAFTER_FINGERPRINT],
            block_size=int(found.tags[t.BLOCK_SIZE]),
            tags=dict(found.tags),
            run_id=found.run_id or "",
            aliases=tuple(sorted(found.aliases)),
            serves=t.serve_entries(found.tags),
            source=found.source or "",
        )

    def _create_version(self, drafter_dir: Path, run_id: str, tags: Mapping[str, str]) -> int:
        files = hash_files(drafter_dir)
        drafter = tags[t.DRAFTER_FINGERPRINT]
        model_id = self._runs.store_drafter(drafter_dir, run_id, drafter, fingerprint(files))
        self._ensure_model()
        own = {t.FILES: json.dumps(files), t.RUN_ID: run_id, t.MODEL_ID: model_id}
        with global_tracking_uri(self.tracking_uri):
            created = self.client.create_model_version(
                self.name,
                source=f"models:/{model_id}",
                run_id=run_id,
                model_id=model_id,
                tags={**tags, **own},
                await_creation_for=0,
            )
        return int(created.version)

    def _ensure_model(self) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self.client.create_registered_model(self.name, tags={t.SCHEMA: t.SCHEMA_VERSION})
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            self.client.set_registered_model_tag(self.name, t.SCHEMA, t.SCHEMA_VERSION)

    def _record_serving(self, version: int, entry: ServeEntry) -> None:
        tag = t.serves_tag(entry["target_fingerprint"])
        self.client.set_model_version_tag(self.name, str(version), tag, t.format_serve_entry(entry))

    def _set_alias(self, alias: str, version: int) -> None:
        self.client.set_registered_model_alias(self.name, alias, str(version))

    def _confirm(self, version: int, aliases: set[str], entry: ServeEntry | None = None) -> RegisteredDrafter:
        drafter = self.version(version)
        wanted = aliases | ({t.target_alias(entry["target_fingerprint"])} if entry else set())
        missing = sorted(wanted - set(drafter.aliases))
        if entry and drafter.serves.get(entry["target_fingerprint"]) != entry:
            missing.append(t.serves_tag(entry["target_fingerprint"]))
        if missing:
            raise RegistryConflictError(
                f"version {version} of {self.name} did not keep {', '.join(missing)}: another writer was at "
                "work; run the job again"
            )
        return drafter
