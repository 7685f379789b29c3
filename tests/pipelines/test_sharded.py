"""A stage worked off shard by shard: what is kept of an earlier run, what is redone, what is added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_core.store.artifacts import DamagedArtifactError, Store, Workspace
from pipelines.cluster import ClusterInfo
from pipelines.mend import mending
from pipelines.placement import Placement
from pipelines.pool import release_actors
from pipelines.sharded import Row, Totals, work_off
from pipelines.stage import StageResult, run_stage

TASKS = [{"name": f"part-{i}.txt"} for i in range(5)]


def placement(**changes: Any) -> Placement:
    values: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "train_threads": 1,
        "num_actors": 2,
        "min_actors": 1,
        "cpus_per_actor": 0.5,
        "gpus_per_actor": 0.0,
        "keep_actors": True,
        "release_idle": False,
    }
    return Placement(**(values | changes))


def run_tasks(
    workspace: Workspace,
    on_row: Callable[[Row, bool], None] = lambda _row, _fresh: None,
    tasks: list[Row] | None = None,
    worker: str = "PartWorker",
) -> Totals:
    return work_off(
        workspace,
        f"tests.pipelines.ray_workers.{worker}",
        {"workspace": workspace},
        TASKS if tasks is None else tasks,
        placement(),
        lambda: None,
        on_row,
    )


@pytest.fixture
def store(local_ray: ClusterInfo, tmp_path: Path) -> Iterator[Store]:
    yield Store.open(str(tmp_path / "store"))
    release_actors()


def stage(store: Store, body: Callable[[Workspace], Any]) -> StageResult:
    def whole(workspace: Workspace) -> dict[str, Any]:
        body(workspace)
        return {}

    return run_stage(store, "extract", {}, whole, code_version=1, resumable=True)


def interrupted(store: Store) -> Path:
    """A workspace in which all tasks are done, and nothing is committed."""

    def body(workspace: Workspace) -> None:
        run_tasks(workspace)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        stage(store, body)
    (partial,) = Path(store.location, "extract").iterdir()
    return partial


def test_rows_are_added_up_and_an_earlier_runs_count_too(store: Store) -> None:
    seen: list[tuple[str, bool]] = []
    partial = interrupted(store)
    (partial / "rows/part-1.txt.json").unlink()
    (partial / ".records/rows/part-3.txt.json.json").unlink()

    def body(workspace: Workspace) -> None:
        totals = run_tasks(workspace, lambda row, fresh: seen.append((row["name"], fresh)))
        assert totals.pick("tokens", "none") == {"tokens": 50, "none": 0}
        assert totals["kinds"] == {"a": 5, "b": 10}
        assert totals["bytes"] == sum(len(task["name"]) for task in TASKS)
        assert totals.peak_mb > 10

    stage(store, body)
    assert sorted(seen) == [(t["name"], t["name"] in ("part-1.txt", "part-3.txt")) for t in TASKS]
    assert [fresh for _, fresh in seen] == sorted(fresh for _, fresh in seen)


@pytest.mark.parametrize("damage", ["short", "gone"])
def test_a_shard_that_is_no_longer_there_whole_is_made_again(store: Store, damage: str) -> None:
    partial = interrupted(store)
    (partial / "part-2.txt").unlink()
    if damage == "short":
        (partial / "part-2.txt").write_text("p")
    seen: list[tuple[str, bool]] = []
    made = stage(store, lambda w: run_tasks(w, lambda row, fresh: seen.append((row["name"], fresh))))
    assert {name for name, fresh in seen if fresh} == {"part-2.txt"}
    made.artifact.verify()


def test_rows_of_other_tasks_are_not_counted(store: Store) -> None:
    def body(workspace: Workspace) -> None:
        run_tasks(workspace)
        assert run_tasks(workspace, tasks=TASKS[:2])["tokens"] == 20

    stage(store, body)


def test_a_committed_shard_whose_content_changed_is_named_and_made_again_alone(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def flow() -> dict[str, str]:
        made = stage(store, lambda w: run_tasks(w, lambda row, fresh: seen.extend([row["name"]] * fresh)))
        return {t["name"]: made.artifact.local(t["name"]).read_text() for t in TASKS}

    whole = mending(store, flow)
    (place,) = Path(store.location, "extract").iterdir()
    (place / "part-3.txt").write_text("part-X.txt")
    seen.clear()
    assert mending(store, flow) == whole
    assert seen == ["part-3.txt"]
    assert f"{place}/part-3.txt is damaged" in capsys.readouterr().err
    assert [p.name for p in place.parent.iterdir()] == [place.name]

    def never_whole() -> None:
        flow()
        (place / "part-3.txt").write_text("part-X.txt")
        flow()

    with pytest.raises(DamagedArtifactError):
        mending(store, never_whole)
