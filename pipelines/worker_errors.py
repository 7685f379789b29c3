"""A worker's exception on its way to the driver: the same class and message, told where it was raised."""

from __future__ import annotations

import base64
import pickle
import traceback


class WorkerError(Exception):
    """Carries an exception through Ray as text, whatever its class needs in order to be pickled."""

    def __init__(self, packed: str) -> None:
        super().__init__(packed)
        self.packed = packed

    @classmethod
    def of(cls, error: Exception) -> WorkerError:
        """`error` with its traceback as a note; one that can't be pickled becomes a RuntimeError."""
        error.add_note("raised in a worker:\n" + "".join(traceback.format_exception(error)))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301 - our own bytes; some classes pickle and don't come back
        except Exception:  # noqa: BLE001 - a class's own pickling may raise anything
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            plain.__notes__ = error.__notes__
            pickled = pickle.dumps(plain)
        return cls(base64.b64encode(pickled).decode())

    def original(self) -> Exception:
        """The exception as the worker raised it."""
        error: Exception = pickle.loads(base64.b64decode(self.packed))  # noqa: S301 - from our own worker
        return error
