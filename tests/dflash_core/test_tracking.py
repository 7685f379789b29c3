"""The tracking URI, with real databases and real sockets."""

from __future__ import annotations

import http.server
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_core.errors import UserError
from dflash_core.tracking import display_uri, probe_tracking, resolve_tracking_uri, sqlite_path


def test_a_relative_database_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    uri = resolve_tracking_uri("sqlite:///mlflow.db")
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve_tracking_uri(uri) == uri
    assert sqlite_path(uri) == tmp_path / "mlflow.db"
    assert resolve_tracking_uri("sqlite:///a/b.db", Path("/base")) == "sqlite:////base/a/b.db"
    assert resolve_tracking_uri(uri, Path("/base")) == uri


def test_a_server_is_taken_as_it_is() -> None:
    assert resolve_tracking_uri("https://host:5000/mlflow/") == "https://host:5000/mlflow"
    assert sqlite_path("https://host:5000") is None


@pytest.mark.parametrize(
    "uri", ["", "mlruns", "./mlruns", "/data/mlruns", "file:///data/mlruns", "mlflow.db"]
)
def test_file_stores_are_refused_with_the_remedy(uri: str) -> None:
    with pytest.raises(UserError, match=r"pass sqlite:///PATH\.db or http"):
        resolve_tracking_uri(uri)


@pytest.mark.parametrize(
    "uri", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "ftp://x", "http://", "http://h:x"]
)
def test_what_cannot_keep_a_registry_is_refused(uri: str) -> None:
    with pytest.raises(UserError, match="tracking URI"):
        resolve_tracking_uri(uri)


def test_a_database_server_is_to_stand_behind_mlflow_and_its_password_is_not_shown() -> None:
    with pytest.raises(UserError, match="mlflow server --backend-store-uri") as caught:
        resolve_tracking_uri("postgresql+psycopg2://ann:secret@db/mlflow")
    assert "secret" not in str(caught.value)


def test_passwords_are_not_shown() -> None:
    assert display_uri("https://ann:s@cret@host:1/p@th") == "https://host:1/p@th"
    assert display_uri("sqlite:////data/a@b.db") == "sqlite:////data/a@b.db"


def test_a_database_to_be_made_is_not_made_by_asking(tmp_path: Path) -> None:
    probe_tracking(f"sqlite:///{tmp_path}/new.db")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="does not exist; create"):
        probe_tracking(f"sqlite:///{tmp_path}/no/new.db")


def test_a_damaged_and_a_locked_database(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database at all, whatever its name " * 100)
    with pytest.raises(UserError, match="not a database"):
        probe_tracking(f"sqlite:///{damaged}")
    with pytest.raises(UserError, match="cannot be used"):
        probe_tracking(f"sqlite:///{tmp_path}")

    path = tmp_path / "good.db"
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("CREATE TABLE t (x)")
    probe_tracking(f"sqlite:///{path}")
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(UserError, match="locked"):
        probe_tracking(f"sqlite:///{path}", seconds=0.1)
    holder.close()


@pytest.fixture
def refusing_server() -> Iterator[int]:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_any_answer_is_an_answer(refusing_server: int) -> None:
    probe_tracking(f"http://ann:secret@127.0.0.1:{refusing_server}")


def test_a_server_that_is_not_there_or_never_answers() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        uri = f"http://ann:secret@127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match="does not answer") as caught:
            probe_tracking(uri)  # bound, nobody listens
        assert "secret" not in str(caught.value)
        silent.listen()
        with pytest.raises(UserError, match=r"does not answer \(timed out\)"):
            probe_tracking(uri, seconds=0.2)  # accepted by the kernel, never answered
