"""Tasks go out to real actors, come back as they are done, and survive what happens to actors."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import DFlashError, UserError
from pipelines.cluster import ClusterInfo
from pipelines.fanout import fan_out
from tests.pipelines.processes import alive, until
from tests.pipelines.ray_workers import TouchWorker, attempts_at

POOL: dict[str, Any] = {"num_actors": (1, 2), "num_cpus": 0.5}


def task(name: str, kind: str = "plain", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, **more}


def test_rows_come_as_they_are_done_and_tasks_arrive_whole(local_ray: ClusterInfo, tmp_path: Path) -> None:
    content = {"text": "τ – 两", "none": None, "nested": {"list": [1, 2.5, True]}}
    tasks = [task("last", "wait", **{"for": "go"}), *(task(f"t{i}", content=content) for i in range(5))]
    # Actors on every CPU: nothing else may need one.
    rows = fan_out(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=(1, 2), num_cpus=1)
    early = [next(rows) for _ in range(5)]
    assert sorted(row["name"] for row in early) == [f"t{i}" for i in range(5)]
    assert all(row["task"]["content"] == content for row in early)
    (tmp_path / "go").touch()
    assert [row["name"] for row in rows] == ["last"]
    assert all(attempts_at(tmp_path, t["name"]) == 1 for t in tasks)


def test_a_killed_actor_is_replaced_and_says_nothing_on_stdout(
    local_ray: ClusterInfo,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tasks = [task("fatal", "die", deaths=2), *(task(f"t{i}") for i in range(3))]
    rows = list(fan_out(TouchWorker, {"folder": str(tmp_path)}, tasks, **POOL))
    assert {row["name"]: row["attempts"] for row in rows} == {"fatal": 3, "t0": 1, "t1": 1, "t2": 1}
    assert capfd.readouterr().out == ""


def test_a_task_that_always_kills_its_actor_ends_the_fan_out(local_ray: ClusterInfo, tmp_path: Path) -> None:
    tasks = [task("fatal", "die", deaths=99)]
    with pytest.raises(DFlashError, match="a worker process died 2 times over one task"):
        list(fan_out(TouchWorker, {"folder": str(tmp_path)}, tasks, max_retries=1, **POOL))
    assert attempts_at(tmp_path, "fatal") == 2


def test_a_users_mistake_comes_back_as_it_was_raised(local_ray: ClusterInfo, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        list(fan_out(TouchWorker, {"folder": str(tmp_path)}, [task("bad", "refuse")], **POOL))
    assert str(caught.value) == "bad is refused: give another"
    assert "ray_workers.py" in caught.value.__notes__[0]
    assert attempts_at(tmp_path, "bad") == 1

    arguments = {"folder": str(tmp_path), "refuse": True}
    with pytest.raises(UserError) as caught:
        list(fan_out(TouchWorker, arguments, [task("unmade")], **POOL))
    assert str(caught.value) == "the folder is refused: give another"
    assert not (tmp_path / "unmade").exists()


def test_closing_ends_the_actors(local_ray: ClusterInfo, tmp_path: Path) -> None:
    tasks = [task("first"), task("endless", "wait", **{"for": "never"})]
    with closing(fan_out(TouchWorker, {"folder": str(tmp_path)}, tasks, **POOL)) as rows:
        assert next(rows)["name"] == "first"
        until((tmp_path / "endless").exists)
        pid = int((tmp_path / "endless").read_text())
        assert alive(pid)
    until(lambda: not alive(pid))


def test_more_than_the_cluster_has_is_refused(local_ray: ClusterInfo, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 workers of 1 CPUs and 1 GPUs each don't fit"):
        next(
            fan_out(
                TouchWorker,
                {"folder": str(tmp_path)},
                [task("t")],
                num_actors=(1, 1),
                num_cpus=1,
                num_gpus=1,
            )
        )


def test_nothing_to_do_needs_no_ray(tmp_path: Path) -> None:
    assert list(fan_out(TouchWorker, {"folder": str(tmp_path)}, [], **POOL)) == []
