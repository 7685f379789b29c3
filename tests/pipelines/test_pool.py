"""Tasks go out to real actors, come back as they are done, and survive what happens to actors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dflash_core.errors import DFlashError, UserError
from pipelines.cluster import ClusterInfo
from pipelines.pool import ActorSize, Pool
from tests.pipelines.processes import alive, until
from tests.pipelines.ray_workers import TouchWorker, attempts_at


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(ActorSize(num_cpus=0.5))
    yield made
    made.close()


def task(name: str, kind: str = "plain", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, **more}


def test_rows_come_as_they_are_done_and_tasks_arrive_whole(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    content = {"text": "τ – 两", "none": None, "nested": {"list": [1, 2.5, True]}}
    tasks = [task("last", "wait", **{"for": "go"}), *(task(f"t{i}", content=content) for i in range(5))]
    rows = pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=2)
    early = [next(rows) for _ in range(5)]
    assert sorted(row["name"] for row in early) == [f"t{i}" for i in range(5)]
    assert all(row["task"]["content"] == content for row in early)
    (tmp_path / "go").touch()
    assert [row["name"] for row in rows] == ["last"]
    assert all(attempts_at(tmp_path, t["name"]) == 1 for t in tasks)


def test_a_killed_actor_is_replaced_and_says_nothing_on_stdout(
    local_ray: ClusterInfo,
    pool: Pool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tasks = [task("fatal", "die", deaths=2), *(task(f"t{i}") for i in range(3))]
    rows = list(pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=2))
    assert {row["name"]: row["attempts"] for row in rows} == {"fatal": 3, "t0": 1, "t1": 1, "t2": 1}
    assert capfd.readouterr().out == ""


def test_a_task_that_always_kills_its_actor_ends_the_fan_out(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    tasks = [task("fatal", "die", deaths=99)]
    with pytest.raises(DFlashError, match="a worker process died 2 times over one task"):
        list(pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, max_retries=1, num_actors=2))
    assert attempts_at(tmp_path, "fatal") == 2


def test_a_users_mistake_comes_back_as_it_was_raised(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        list(pool.run(TouchWorker, {"folder": str(tmp_path)}, [task("bad", "refuse")], num_actors=2))
    assert str(caught.value) == "bad is refused: give another"
    assert "ray_workers.py" in caught.value.__notes__[0]
    assert attempts_at(tmp_path, "bad") == 1

    arguments = {"folder": str(tmp_path), "refuse": True}
    with pytest.raises(UserError) as caught:
        list(pool.run(TouchWorker, arguments, [task("unmade")], num_actors=2))
    assert str(caught.value) == "the folder is refused: give another"
    assert not (tmp_path / "unmade").exists()


def test_closing_ends_the_actors(local_ray: ClusterInfo, pool: Pool, tmp_path: Path) -> None:
    tasks = [task("first"), task("endless", "wait", **{"for": "never"})]
    with closing(pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=2)) as rows:
        assert next(rows)["name"] == "first"
        until((tmp_path / "endless").exists)
        pid = int((tmp_path / "endless").read_text())
        assert alive(pid)
    until(lambda: not alive(pid))


def test_more_than_the_cluster_has_is_refused(local_ray: ClusterInfo, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 workers of 1 CPUs and 1 GPUs each don't fit"):
        next(
            Pool(ActorSize(num_cpus=1, num_gpus=1)).run(
                TouchWorker, {"folder": str(tmp_path)}, [task("t")], num_actors=1
            )
        )


def test_nothing_to_do_needs_no_ray(pool: Pool, tmp_path: Path) -> None:
    assert list(pool.run(TouchWorker, {"folder": str(tmp_path)}, [], num_actors=2)) == []


def test_actors_outlive_a_run_and_take_another_kind_of_work(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    def pids(folder: Path) -> set[str]:
        folder.mkdir()
        rows = pool.run(
            TouchWorker,
            {"folder": str(folder)},
            [task("a", "meet", other="b"), task("b", "meet", other="a")],
            num_actors=2,
        )
        return {(folder / row["name"]).read_text().strip() for row in rows}

    first = pids(tmp_path / "first")
    assert len(first) == 2
    assert pids(tmp_path / "second") == first


def test_a_failed_run_leaves_no_actor_and_the_next_starts_afresh(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="bad is refused"):
        list(pool.run(TouchWorker, {"folder": str(tmp_path)}, [task("bad", "refuse")], num_actors=1))
    pid = int((tmp_path / "bad").read_text())
    until(lambda: not alive(pid))
    (row,) = pool.run(TouchWorker, {"folder": str(tmp_path)}, [task("good")], num_actors=1)
    assert row["attempts"] == 1


def test_one_actor_with_room_is_enough(local_ray: ClusterInfo, tmp_path: Path) -> None:
    pool = Pool(ActorSize(num_cpus=1.5))
    try:
        rows = list(
            pool.run(TouchWorker, {"folder": str(tmp_path)}, [task("a"), task("b"), task("c")], num_actors=3)
        )
        assert sorted(row["name"] for row in rows) == ["a", "b", "c"]
        assert len({(tmp_path / name).read_text() for name in "abc"}) == 1
    finally:
        pool.close()


def test_a_pool_outlives_the_ray_it_worked_on(pool: Pool, tmp_path: Path) -> None:
    """Another test's Ray is left alone: this one brings its own process."""
    script = f"""
from pipelines.cluster import connect, disconnect
from pipelines.pool import ActorSize, kept_pool
from tests.pipelines.ray_workers import TouchWorker
for name in ("one", "two"):
    connect("local", num_cpus=1)
    pool = kept_pool(ActorSize(0.5))
    task = {{"name": name, "kind": "plain"}}
    (row,) = pool.run(TouchWorker, {{"folder": {str(tmp_path)!r}}}, [task], num_actors=1)
    print(row["name"], row["attempts"])
    disconnect()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "one 1\ntwo 1\n"), done.stderr


def test_tasks_are_asked_for_when_an_actor_is_free_for_them(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    asked: list[int] = []

    def tasks() -> Iterator[dict[str, Any]]:
        for number in range(20):
            asked.append(number)
            yield task(f"t{number}")

    rows = pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks(), num_actors=2)
    for done in range(1, 21):
        next(rows)
        assert len(asked) <= done + 2
    assert list(rows) == []


def test_work_begins_once_the_least_number_of_actors_has_started(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path
) -> None:
    # Each waits for the other: with one of them at work alone it would never end.
    tasks = [task("a", "meet", other="b"), task("b", "meet", other="a"), task("c")]
    rows = pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=2, min_actors=2)
    assert sorted(row["name"] for row in rows) == ["a", "b", "c"]
    too_many = Pool(ActorSize(num_cpus=1.5)).run(
        TouchWorker, {"folder": str(tmp_path)}, [task("d"), task("e")], num_actors=2, min_actors=2
    )
    with pytest.raises(UserError, match=r"2 workers of 1\.5 CPUs"):
        next(too_many)


def test_where_others_wait_an_idle_actor_is_let_go_before_the_slowest_task_is_done(
    local_ray: ClusterInfo, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.pool.RELEASE_SECONDS", 0.2)
    monkeypatch.setattr("pipelines.pool.POLL_SECONDS", 0.1)
    tasks = [task("slow", "wait", **{"for": "go"}), task("quick", "meet", other="slow")]
    rows = pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=2, release_idle=True)
    assert next(rows)["name"] == "quick"
    idle = int((tmp_path / "quick").read_text())

    def finish() -> None:
        until(lambda: not alive(idle))
        (tmp_path / "go").touch()

    waiter = threading.Thread(target=finish)
    waiter.start()
    assert [row["name"] for row in rows] == ["slow"]
    waiter.join()
    (again,) = pool.run(TouchWorker, {"folder": str(tmp_path)}, [task("later")], num_actors=2)
    assert (tmp_path / "later").read_text() == (tmp_path / "slow").read_text()
    assert again["attempts"] == 1


def test_actors_that_wait_for_room_are_let_go_when_no_task_is_left(
    local_ray: ClusterInfo, tmp_path: Path
) -> None:
    pool = Pool(ActorSize(num_cpus=1.5))
    try:
        tasks = [task("a"), task("b"), task("c")]
        rows = pool.run(TouchWorker, {"folder": str(tmp_path)}, tasks, num_actors=3, release_idle=True)
        assert len(list(rows)) == 3
        assert len(pool._actors) == 1
    finally:
        pool.close()
