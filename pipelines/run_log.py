"""One finished realignment = one MLflow run; the drafter it made = one logged model; both are found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dflash_core import tags as t
from dflash_core.errors import UserError
from dflash_core.fingerprint import SHORT
from dflash_core.tracking import sqlite_path

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_PER_BATCH = 100
"""MLflow takes at most 100 params and 1,000 entries in one request."""
_NOTE = "mlflow.note.content"
"""MLflow shows this tag as the run's description."""


@dataclass(frozen=True)
class RunRecord:
    """What is kept of one finished realignment."""

    tags: Mapping[str, str]
    """`dflash.*`; job identity and outcome must be among them, for a rerun finds its run by these."""
    params: Mapping[str, object]
    metrics: Mapping[str, float]
    step_metrics: Mapping[str, Mapping[int, float]]
    """Values by step: acceptance by position, the curves of the training."""
    report_dir: Path | None = None
    """Its files become the artifacts `report/…`."""


class RunLog:
    """The experiment of one registered model."""

    def __init__(self, client: MlflowClient, tracking_uri: str, experiment: str) -> None:
        self.client = client
        self.tracking_uri = tracking_uri
        self.experiment = experiment

    def record(self, record: RunRecord) -> str:
        """The id of the run that holds `record`.

        A run is known by its job identity and outcome. A finished one is returned as it is; one that a crash
        left open is completed.
        """
        run = self._find(record.tags) or self._create(record.tags)
        run_id = str(run.info.run_id)
        if run.info.status == "FINISHED":
            return run_id
        self._log(run, record)
        if record.report_dir is not None:
            self.client.log_artifacts(run_id, str(record.report_dir), t.REPORT_DIR)
        self.client.set_terminated(run_id, "FINISHED")
        return run_id

    def store_drafter(
        self, directory: Path, run_id: str, drafter_fingerprint: str, files_fingerprint: str
    ) -> str:
        """The id of the logged model that holds `directory`, linked to the run as its output."""
        from mlflow.entities import LoggedModelOutput

        model = self._find_drafter(files_fingerprint) or self.client.create_logged_model(
            self._experiment_id(),
            name=f"drafter-{drafter_fingerprint[:SHORT]}",
            source_run_id=run_id,
            tags={t.FILES_FINGERPRINT: files_fingerprint, t.DRAFTER_FINGERPRINT: drafter_fingerprint},
            model_type="drafter",
        )
        model_id = str(model.model_id)
        if str(model.status) != "READY":
            self.client.log_model_artifacts(model_id, str(directory))
            self.client.finalize_logged_model(model_id, "READY")
        outputs = self.client.get_run(run_id).outputs
        if outputs is None or model_id not in {output.model_id for output in outputs.model_outputs}:
            self.client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])
        return model_id

    def _experiment_id(self) -> str:
        found = self.client.get_experiment_by_name(self.experiment)
        if found is None:
            location = self._artifact_location()
            return str(self.client.create_experiment(self.experiment, artifact_location=location))
        if found.lifecycle_stage != "active":
            raise UserError(
                f"the MLflow experiment {self.experiment!r} is deleted; run `mlflow experiments restore "
                f"--experiment-id {found.experiment_id}` or pass another --model-name"
            )
        return str(found.experiment_id)

    def _artifact_location(self) -> str | None:
        """Beside the database, not in whichever folder the job was started from; a server knows its own."""
        path = sqlite_path(self.tracking_uri)
        return None if path is None else (path.parent / "mlartifacts").as_uri() + "/" + quote(self.experiment)

    def _find(self, tags: Mapping[str, str]) -> Run | None:
        identity, outcome = tags[t.JOB_IDENTITY], tags[t.OUTCOME]
        found = self.client.search_runs(
            [self._experiment_id()],
            f"tags.`{t.JOB_IDENTITY}` = '{identity}' and tags.`{t.OUTCOME}` = '{outcome}'",
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        return found[0] if found else None

    def _create(self, tags: Mapping[str, str]) -> Run:
        name = f"{tags[t.OUTCOME]} {tags.get(t.TARGET_FINGERPRINT, '')[:SHORT]}".strip()
        return self.client.create_run(self._experiment_id(), run_name=name, tags=dict(tags))

    def _log(self, run: Run, record: RunRecord) -> None:
        """Repeatable: what is logged twice bears the run's own time, so is one entry; params stay as set."""
        from mlflow.entities import Metric, Param, RunTag

        at = run.info.start_time
        metrics = [Metric(name, float(value), at, 0) for name, value in record.metrics.items()]
        for name, values in record.step_metrics.items():
            metrics += [Metric(name, float(value), at, k) for k, value in values.items()]
        params = [Param(name, str(v)) for name, v in record.params.items() if name not in run.data.params]
        note = {_NOTE: record.tags[t.REASON]} if t.REASON in record.tags else {}
        tags = [RunTag(name, value) for name, value in {**record.tags, **note}.items()]
        for start in range(0, max(len(metrics), len(params), len(tags)), _PER_BATCH):
            part = slice(start, start + _PER_BATCH)
            self.client.log_batch(
                run.info.run_id, metrics=metrics[part], params=params[part], tags=tags[part]
            )

    def _find_drafter(self, files_fingerprint: str) -> Any:
        """A logged model with the same files: READY, or PENDING if a crash interrupted its upload."""
        found = self.client.search_logged_models(
            [self._experiment_id()], filter_string=f"tags.`{t.FILES_FINGERPRINT}` = '{files_fingerprint}'"
        )
        return next((model for model in found if str(model.status) in ("READY", "PENDING")), None)
