"""MLflow's client, opened late and quietly, and its failures in words a user can act on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dflash_core.errors import UserError
from dflash_core.tracking import display_uri, quiet_mlflow

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

_OUTSIDE = {
    "TEMPORARILY_UNAVAILABLE": "see that its database is neither locked nor full",
    "PERMISSION_DENIED": "pass credentials that may write (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_TOKEN)",
    "UNAUTHENTICATED": "pass credentials (MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_TOKEN)",
}
"""Error codes that are nobody's bug -> the remedy."""


def open_client(uri: str) -> MlflowClient:
    """A client of the tracking store and registry at a resolved and probed `uri`.

    Imports MLflow (3 s), then opens the database: 1 s, or 3 s when it has to be made.
    """
    quiet_mlflow()
    for noisy in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    with plain_errors(uri):
        return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def plain_errors(uri: str) -> Iterator[None]:
    """Turns what went wrong outside of us (network, disk, rights) into UserError; our own faults pass."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        remedy = _remedy(error)
        if remedy is None:
            raise
        first_line = str(error).strip().splitlines()[0][:200]
        raise UserError(f"MLflow at {display_uri(uri)} failed ({first_line}); {remedy}") from error
    except OSError as error:
        raise UserError(
            f"MLflow at {display_uri(uri)} could not read or write files ({error}); free or unlock the disk"
        ) from error


@contextmanager
def global_tracking_uri(uri: str) -> Iterator[None]:
    """Makes `uri` MLflow's global one for a while.

    Resolving a `models:/` source ignores the client at hand and asks the global store, which by default is a
    database that MLflow would create in the working folder.
    """
    import mlflow

    before = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)  # type: ignore[arg-type]  # None unsets it


def _remedy(error: MlflowException) -> str | None:
    text = str(error)
    if "API request to" in text:
        return "see that an MLflow server runs there and can be reached"
    if "out-of-date database schema" in text:
        return "back it up and run `mlflow db upgrade`"
    return _OUTSIDE.get(error.error_code)
