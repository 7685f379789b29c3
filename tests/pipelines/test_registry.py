"""The registry on a real sqlite database and a real MLflow server."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest

from dflash_core import tags as t
from dflash_core.errors import ExitCode, UserError
from dflash_core.types import Interval
from pipelines.mlflow_client import global_tracking_uri, open_client
from pipelines.registry import Registry, RegistryConflictError

CHECKOUT = Path(__file__).parents[2]
TARGET_A, TARGET_B = "a" * 64, "b" * 64


@dataclass(frozen=True)
class NewDatabase:
    path: Path
    printed: str
    litter: list[Path]
    """What its making left in the working folder."""


@pytest.fixture(scope="module")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> NewDatabase:
    """Made once, as a job makes it: MLflow's migrations take three seconds."""
    store, elsewhere = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("elsewhere")
    code = (
        "import logging, sys; logging.basicConfig(level=logging.INFO);"
        "from pipelines.mlflow_client import open_client; open_client(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, f"sqlite:///{store}/mlflow.db"]
    env = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    shown = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=True)
    return NewDatabase(store / "mlflow.db", shown.stdout + shown.stderr, list(elsewhere.iterdir()))


@pytest.fixture
def sqlite_uri(tmp_path: Path, new_database: NewDatabase) -> str:
    folder = tmp_path / "a store"
    folder.mkdir()
    return f"sqlite:///{shutil.copy(new_database.path, folder / 'mlflow.db')}"


@pytest.fixture(scope="module")
def server_uri(tmp_path_factory: pytest.TempPathFactory, new_database: NewDatabase) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    database = shutil.copy(new_database.path, folder / "mlflow.db")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{database}"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(server, f"http://127.0.0.1:{port}", folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def _wait_until_healthy(server: subprocess.Popen[bytes], uri: str, log: Path) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{uri}/health", timeout=5).close()
        except OSError:
            try:
                server.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
        else:
            return
    pytest.fail(f"mlflow server ended: {log.read_text()[-2000:]}")


@pytest.fixture(params=["sqlite", "server"])
def registry(request: pytest.FixtureRequest) -> Registry:
    uri = request.getfixturevalue(f"{request.param}_uri")
    return Registry(uri, f"Family 1.5 {request.node.originalname}")


@pytest.fixture
def local(sqlite_uri: str) -> Registry:
    return Registry(sqlite_uri, "family")


def drafter_dir(tmp_path: Path, mark: str) -> Path:
    folder = tmp_path / f"drafter-{mark}"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"mark": mark}))
    (folder / "sub" / "model.safetensors").write_bytes(mark.encode() * 1000)
    return folder


def version_tags(mark: str) -> dict[str, str]:
    return {t.DRAFTER_FINGERPRINT: (mark * 64)[:64], t.BLOCK_SIZE: "8", t.OUTCOME: "held"}


def entry(target: str, run_id: str = "r", tau: float = 4.0) -> t.ServeEntry:
    return t.ServeEntry(
        target_fingerprint=target,
        target_path="/models/τ <target>",
        tau=tau,
        tau_low=tau - 0.25,
        tau_high=tau + 0.25,
        outcome="promoted",
        job_identity="j",
        run_id=run_id,
        at=t.utc_now(),
    )


def log_run(
    registry: Registry, identity: str, outcome: str = "promoted", report_dir: Path | None = None
) -> str:
    return registry.log_run(
        tags={t.JOB_IDENTITY: identity, t.OUTCOME: outcome, t.REASON: "4.0 is at least 2.0."},
        params={f"config.{i}": i for i in range(150)},
        metrics=t.interval_metrics(t.TAU_CANDIDATE, Interval(4.0, 3.75, 4.25)),
        step_metrics={t.ACCEPTANCE_CANDIDATE: {1: 0.9, 2: 0.7, 3: 0.5}},
        report_dir=report_dir,
    )


def register(registry: Registry, tmp_path: Path, mark: str) -> int:
    run_id = log_run(registry, f"job-{mark}")
    return registry.register(drafter_dir(tmp_path, mark), run_id, version_tags(mark)).version


def aliases(registry: Registry) -> dict[str, int]:
    found = registry.client.get_registered_model(registry.name).aliases
    return {alias: int(version) for alias, version in found.items()}


def test_first_drafter_is_registered_promoted_and_downloaded(registry: Registry, tmp_path: Path) -> None:
    assert registry.serving(TARGET_A) is None
    assert registry.champion() is None
    assert registry.parent_for(TARGET_A) is None
    source = drafter_dir(tmp_path, "1")
    run_id = log_run(registry, "job-1")
    drafter = registry.register(source, run_id, version_tags("1"))

    assert (drafter.version, drafter.block_size, drafter.run_id) == (1, 8, run_id)
    assert drafter.aliases == ()  # registering serves nothing
    assert registry.serving(TARGET_A) is None
    assert registry.client.get_run(run_id).data.tags[t.DRAFTER_VERSION] == "1"
    assert len(registry.client.get_run(run_id).outputs.model_outputs) == 1

    promoted = registry.promote(1, entry(TARGET_A, run_id))
    assert set(promoted.aliases) == {t.CHAMPION, t.target_alias(TARGET_A)}
    assert registry.serving(TARGET_A) == registry.champion() == promoted
    assert promoted.serves == {TARGET_A: entry(TARGET_A, run_id) | {"at": promoted.serves[TARGET_A]["at"]}}

    fetched = registry.download(1, tmp_path / "pulled" / "here")
    assert (fetched / "sub" / "model.safetensors").read_bytes() == b"1" * 1000
    assert sorted(p.name for p in fetched.parent.iterdir()) == ["here"]


def test_anybody_gets_the_plain_directory_from_mlflow(registry: Registry, tmp_path: Path) -> None:
    version = register(registry, tmp_path, "1")
    registry.promote(version, entry(TARGET_A))
    with global_tracking_uri(registry.tracking_uri):
        theirs = mlflow.artifacts.download_artifacts(
            f"models:/{registry.name}@champion", dst_path=str(tmp_path / "theirs")
        )
    folder = Path(theirs)
    found = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    assert found == ["config.json", "sub/model.safetensors"]


def test_everything_repeats_without_a_second_copy(registry: Registry, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.html").write_text("<h1>ok</h1>")
    first = log_run(registry, "job-1", report_dir=report)
    assert log_run(registry, "job-1", report_dir=report) == first
    assert log_run(registry, "job-1", outcome="held") != first

    folder = drafter_dir(tmp_path, "1")
    drafter = registry.register(folder, first, version_tags("1"))
    assert registry.register(folder, first, version_tags("1")) == drafter
    assert registry.find_by_drafter("1" * 64) == drafter
    assert registry.find_by_drafter("2" * 64) is None

    run = registry.client.get_run(first)
    assert run.info.status == "FINISHED"
    assert run.data.params["config.149"] == "149"
    assert t.interval_from(run.data.metrics, t.TAU_CANDIDATE) == Interval(4.0, 3.75, 4.25)
    points = registry.client.get_metric_history(first, t.ACCEPTANCE_CANDIDATE)
    assert sorted((point.step, point.value) for point in points) == [(1, 0.9), (2, 0.7), (3, 0.5)]
    assert [file.path for file in registry.client.list_artifacts(first, t.REPORT_DIR)] == [t.REPORT_HTML]


def test_promotion_moves_the_aliases_and_keeps_the_old_target(registry: Registry, tmp_path: Path) -> None:
    old, new = register(registry, tmp_path, "1"), register(registry, tmp_path, "2")
    registry.promote(old, entry(TARGET_A))
    assert registry.hold(new).aliases == (t.CHALLENGER,)
    assert registry.promote(new, entry(TARGET_B)).tags[t.OUTCOME] == "promoted"  # no longer "held"
    assert aliases(registry) == {
        t.CHAMPION: new,
        t.PREVIOUS: old,
        t.target_alias(TARGET_A): old,
        t.target_alias(TARGET_B): new,
    }
    serving = registry.serving(TARGET_A)
    assert serving is not None
    assert serving.version == old
    parent = registry.parent_for("c" * 64)
    assert parent is not None
    assert parent.version == new


def test_certifying_serves_one_more_target_and_leaves_the_champion(
    registry: Registry, tmp_path: Path
) -> None:
    old, new = register(registry, tmp_path, "1"), register(registry, tmp_path, "2")
    registry.promote(old, entry(TARGET_A))
    registry.promote(new, entry(TARGET_B))
    certified = registry.certify(old, entry("c" * 64, tau=3.0))
    assert set(certified.serves) == {TARGET_A, "c" * 64}
    assert aliases(registry)[t.CHAMPION] == new
    assert aliases(registry)[t.target_alias("c" * 64)] == old


def test_a_target_that_shares_only_the_short_fingerprint_is_not_served(
    local: Registry, tmp_path: Path
) -> None:
    local.promote(register(local, tmp_path, "1"), entry(TARGET_A))
    lookalike = TARGET_A[:12] + "0" * 52
    assert t.target_alias(lookalike) == t.target_alias(TARGET_A)
    assert local.serving(lookalike) is None


class CrashError(Exception):
    """Stands for the machine going away."""


class CrashingClient:
    """A real client that goes away just before its n-th write."""

    WRITES = ("set_", "create_", "delete_", "log_", "finalize_")

    def __init__(self, client: Any, writes_left: int) -> None:
        self._client = client
        self._writes_left = writes_left

    def __getattr__(self, name: str) -> Any:
        if name.startswith(self.WRITES):
            if self._writes_left == 0:
                raise CrashError(name)
            self._writes_left -= 1
        return getattr(self._client, name)


def crash_at(uri: str, step: int) -> Registry:
    registry = Registry(uri, "family")
    registry.client = CrashingClient(open_client(uri), step)  # type: ignore[assignment]
    return registry


def test_promotion_converges_from_a_crash_at_any_step(local: Registry, tmp_path: Path) -> None:
    first, old, new = (register(local, tmp_path, mark) for mark in "123")
    before = {t.PREVIOUS: first, t.CHAMPION: old, t.target_alias(TARGET_A): old, t.CHALLENGER: new}
    after = {t.PREVIOUS: old, t.CHAMPION: new, t.target_alias(TARGET_A): new}
    for step in range(11):
        for alias, version in before.items():
            local.client.set_registered_model_alias("family", alias, str(version))
        crashing = crash_at(local.tracking_uri, step)
        if step < 10:  # 6 tags, 3 aliases set and 1 removed
            with pytest.raises(CrashError):
                crashing.promote(new, entry(TARGET_A))
            assert aliases(local) != after
        local.promote(new, entry(TARGET_A))
        assert aliases(local) == after, f"after a crash before write {step}"


def test_a_promotion_killed_after_the_champion_moved_is_found(local: Registry, tmp_path: Path) -> None:
    version = register(local, tmp_path, "1")
    local.promote(version, entry(TARGET_A))
    assert local.interrupted_promotion(TARGET_A, "j") is None
    local.client.delete_registered_model_alias("family", t.target_alias(TARGET_A))
    assert local.interrupted_promotion(TARGET_A, "another job") is None
    assert local.interrupted_promotion(TARGET_B, "j") is None
    left = local.interrupted_promotion(TARGET_A, "j")
    assert left is not None
    served = local.promote(*left)
    assert local.serving(TARGET_A) == served
    assert local.interrupted_promotion(TARGET_A, "j") is None


def test_what_is_promoted_promises_the_tau_it_passed_with(local: Registry, tmp_path: Path) -> None:
    """A held drafter is registered with the τ that settled nothing; more prompts settle it."""
    run_id = log_run(local, "job-1", "held")
    tags = {**version_tags("1"), t.TAU: "2.5", t.JOB_IDENTITY: "the first job"}
    version = local.register(drafter_dir(tmp_path, "1"), run_id, tags).version
    local.hold(version)
    champion = local.promote(version, entry(TARGET_A, tau=3.0))
    assert champion.tags[t.TAU] == "3.0"
    assert (champion.tags[t.TAU_LOW], champion.tags[t.TAU_HIGH]) == ("2.75", "3.25")
    assert (champion.tags[t.OUTCOME], champion.tags[t.JOB_IDENTITY]) == ("promoted", "j")


def test_registration_converges_from_a_crash_at_any_step(local: Registry, tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.mkdir()
    (report / "report.json").write_text("{}")

    def run_and_register(registry: Registry, mark: str) -> tuple[str, int]:
        run_id = log_run(registry, f"job-{mark}", report_dir=report)
        return run_id, registry.register(tmp_path / f"drafter-{mark}", run_id, version_tags(mark)).version

    for step in itertools.count():
        mark = f"{step:x}"
        drafter_dir(tmp_path, mark)
        try:
            run_and_register(crash_at(local.tracking_uri, step), mark)
        except CrashError:
            pass
        else:
            break
        run_id, version = run_and_register(local, mark)
        assert version == step + 1
        assert len(local.client.get_metric_history(run_id, t.ACCEPTANCE_CANDIDATE)) == 3
    # run, 2 batches, report, end; model, its files, finish, output; family, its tag, version, run's tag
    assert step == 13
    experiment = [local.client.get_experiment_by_name("family").experiment_id]
    assert len(local.client.search_runs(experiment)) == step + 1
    assert len(local.client.search_logged_models(experiment)) == step + 1
    assert local.download(step, tmp_path / "pulled").is_dir()


def test_promotion_that_another_writer_undoes_is_noticed(local: Registry, tmp_path: Path) -> None:
    old, new = register(local, tmp_path, "1"), register(local, tmp_path, "2")
    local.promote(old, entry(TARGET_A))
    other = Registry(local.tracking_uri, "family")

    class Meddled(CrashingClient):
        def delete_registered_model_alias(self, *args: str) -> None:
            other.promote(old, entry(TARGET_A))
            self._client.delete_registered_model_alias(*args)

    local.hold(new)
    meddled = Registry(local.tracking_uri, "family")
    meddled.client = Meddled(open_client(local.tracking_uri), 99)  # type: ignore[assignment]
    with pytest.raises(RegistryConflictError, match="run the job again"):
        meddled.promote(new, entry(TARGET_A))


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_download_refuses_what_is_not_what_was_registered(
    local: Registry, tmp_path: Path, damage: str
) -> None:
    version = register(local, tmp_path, "1")
    stored = next((tmp_path / "a store" / "mlartifacts").rglob("model.safetensors"))
    if damage == "changed":
        stored.write_bytes(b"2" * 1000)
    elif damage == "missing":
        stored.unlink()
    else:
        stored.with_name("evil.bin").write_bytes(b"")
    into = tmp_path / "pulled" / "here"
    with pytest.raises(UserError, match="is not the file that was registered"):
        local.download(version, into)
    assert list(into.parent.iterdir()) == []


def test_download_refuses_a_foreign_source_and_a_full_folder(local: Registry, tmp_path: Path) -> None:
    version = register(local, tmp_path, "1")
    hostile = version_tags("2") | {t.FILES: "{}"}
    local.client.create_model_version("family", source="file:///etc", tags=hostile)
    with pytest.raises(UserError, match="file:///etc"):
        local.download(version + 1, tmp_path / "pulled")
    full = drafter_dir(tmp_path, "full")
    with pytest.raises(UserError, match="is there already"):
        local.download(version, full)
    assert (full / "config.json").exists()


def test_a_foreign_version_and_a_missing_one_are_named(local: Registry, tmp_path: Path) -> None:
    register(local, tmp_path, "1")
    local.client.create_model_version("family", source="file:///elsewhere")
    local.client.set_registered_model_alias("family", t.CHAMPION, "2")
    with pytest.raises(UserError, match="no drafter of ours"):
        local.champion()
    with pytest.raises(UserError, match="has no version 7"):
        local.version(7)


def test_a_deleted_experiment_is_named_with_its_remedy(local: Registry) -> None:
    log_run(local, "job-1")
    experiment = local.client.get_experiment_by_name("family")
    local.client.delete_experiment(experiment.experiment_id)
    with pytest.raises(UserError, match="mlflow experiments restore"):
        log_run(local, "job-2")


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "it's", ".hidden", "x" * 201, "a\nb"])
def test_illegal_model_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="model name"):
        Registry(f"sqlite:///{tmp_path}/mlflow.db", name)


def test_looking_makes_no_database_and_imports_no_mlflow(tmp_path: Path) -> None:
    code = (
        "import sys; from pipelines.registry import Registry;"
        "r = Registry('sqlite:///new.db', 'family');"
        f"print(r.serving('{TARGET_A}'), r.champion(), r.find_by_drafter('x'), 'mlflow' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["None", "None", "None", "False"]
    assert list(tmp_path.iterdir()) == []


def test_a_new_database_is_made_quietly_and_alone(new_database: NewDatabase) -> None:
    assert new_database.printed == ""
    assert new_database.litter == []


def test_artifacts_stand_beside_the_database(
    local: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    register(local, tmp_path, "1")
    assert capfd.readouterr() == ("", "")
    assert list(elsewhere.iterdir()) == []
    assert sorted(p.name for p in (tmp_path / "a store").iterdir()) == ["mlartifacts", "mlflow.db"]


def test_a_server_that_dies_after_the_probe_is_the_users_to_mend(
    local: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    client = open_client("http://127.0.0.1:9")  # the discard port: nobody listens
    registry = Registry(local.tracking_uri, "family")
    registry.client = client
    with pytest.raises(UserError, match="see that an MLflow server runs there") as caught:
        log_run(registry, "job-1")
    assert caught.value.exit_code is ExitCode.BAD_INPUT


def test_an_outdated_database_is_named_with_its_remedy(sqlite_uri: str) -> None:
    with sqlite3.connect(sqlite_uri.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    with pytest.raises(UserError, match="mlflow db upgrade"):
        Registry(sqlite_uri, "family").champion()
