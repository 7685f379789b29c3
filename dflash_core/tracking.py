"""Where MLflow is: the tracking URI, understood and tried out before MLflow is imported.

MLflow takes three seconds to import, retries a dead server for minutes and a bad database path ten times
over; these checks say in a moment what is wrong. Nothing here talks to MLflow.
"""

from __future__ import annotations

import http.client
import os
import sqlite3
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from dflash_core.errors import UserError

DEFAULT_TRACKING_URI = "sqlite:///dflash-mlflow.db"
"""In the working folder; where jobs write and the dashboard reads when nothing else is said."""
PROBE_SECONDS = 5.0
"""How long a server may take to answer, and a database to be unlocked."""

_SQLITE = "sqlite:///"
_FORMS = "sqlite:///PATH.db or http://HOST:PORT"


def resolve_tracking_uri(uri: str, base: Path | None = None) -> str:
    """`uri` with a sqlite path made absolute, from `base` or the working folder.

    Raises UserError for what we can't keep a registry in.
    """
    scheme, separator, _ = uri.partition("://")
    if uri.startswith(_SQLITE):
        path, query, options = uri.removeprefix(_SQLITE).partition("?")
        if path in ("", ":memory:"):
            raise UserError(f"tracking URI {uri!r} keeps nothing on disk; pass {DEFAULT_TRACKING_URI}")
        return f"{_SQLITE}{(base or Path.cwd()) / path}{query}{options}"
    if scheme in ("http", "https") and _host_and_port(uri):
        return uri.rstrip("/")
    if not separator or scheme == "file":
        raise UserError(
            f"tracking URI {uri!r} is a plain folder, where MLflow no longer keeps a registry; pass {_FORMS}"
        )
    if scheme.partition("+")[0] in ("postgresql", "mysql", "mssql"):
        raise UserError(
            f"tracking URI {display_uri(uri)!r} is a database server, which does not say where artifacts go; "
            "run `mlflow server --backend-store-uri … --artifacts-destination …` on it and pass its address"
        )
    raise UserError(f"tracking URI {display_uri(uri)!r} is of no kind known here; pass {_FORMS}")


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI, None for a server."""
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]).absolute() if uri.startswith(_SQLITE) else None


def display_uri(uri: str) -> str:
    """`uri` as it may be shown: without the user name and password in it."""
    head, separator, rest = uri.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{head}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def probe_tracking(uri: str, seconds: float = PROBE_SECONDS) -> None:
    """Raises UserError unless the resolved `uri` answers within `seconds`.

    A database that does not exist yet is fine if it could be made; it is not made.
    """
    path = sqlite_path(uri)
    if path is None:
        _probe_server(uri, seconds)
    elif path.exists():
        _probe_database(path, seconds)
    elif not path.parent.is_dir():
        raise UserError(f"the folder of the tracking database {path} does not exist; create {path.parent}")
    elif not os.access(path.parent, os.W_OK):
        raise UserError(f"the tracking database {path} cannot be created; make {path.parent} writable")


def quiet_mlflow() -> None:
    """Defaults that keep MLflow brief and patient for seconds only; what the user has set wins.

    Call it before MLflow is imported. Nothing is printed to stdout (it belongs to `--json`), usage is not
    reported to anybody, and a server that dies is given up after 3 tries instead of 7.
    """
    defaults = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _host_and_port(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False


def _probe_server(uri: str, seconds: float) -> None:
    """Any HTTP answer will do: what the server then refuses, MLflow's own message says better."""
    shown = display_uri(uri)
    parts = urlsplit(uri)
    authority = parts.netloc.rpartition("@")[2]
    try:
        # The scheme is http or https: `resolve_tracking_uri` lets nothing else pass.
        urllib.request.urlopen(f"{parts.scheme}://{authority}{parts.path}/version", timeout=seconds).close()  # noqa: S310
    except urllib.error.HTTPError:
        return
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):  # MLflow has its own settings for certificates
            return
        raise _silent(shown, error.reason) from error
    except (OSError, http.client.HTTPException) as error:
        raise _silent(shown, error) from error


def _silent(shown: str, why: object) -> UserError:
    text = getattr(why, "strerror", None) or str(why) or type(why).__name__
    return UserError(f"the MLflow server at {shown} does not answer ({text}); start it or pass another URI")


def _probe_database(path: Path, seconds: float) -> None:
    """Takes the write lock and lets it go: finds a locked, read-only or damaged file without changing it."""
    try:
        uri = path.as_uri() + "?mode=rw"
        connection = sqlite3.connect(uri, uri=True, timeout=seconds, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT count(*) FROM sqlite_master")
            connection.execute("ROLLBACK")
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise UserError(
            f"the tracking database {path} cannot be used ({error}); "
            "end what holds it, restore it from a backup, or pass another tracking URI"
        ) from error
