"""The exceptions a user can meet; each carries the exit code of the job that it ends.

Raise `UserError` for a user's mistake (the message is one sentence and ends with the remedy),
`LeaseHeldError` when another live run owns the work. Anything else is our own fault: exit code 1.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every job, in one place."""

    OK = 0
    """Promoted, certified or already aligned."""
    INTERNAL = 1
    """Our own fault; a traceback is printed."""
    BAD_INPUT = 2
    """Bad input or configuration: nothing was registered and nothing half-made was left behind."""
    REJECTED = 3
    """The gate refused the candidate."""
    HELD = 4
    """The gate could not decide; a person has to."""
    LEASE_HELD = 5
    """Another live run holds the lease on this work."""


class DFlashError(Exception):
    """Base of the errors that end a job with a message and no traceback."""

    exit_code: ExitCode = ExitCode.INTERNAL


class UserError(DFlashError):
    """The user's input cannot be used; `str(error)` says what, where and how to mend it."""

    exit_code = ExitCode.BAD_INPUT


class LeaseHeldError(DFlashError):
    """Another live run holds the lease on this piece of work."""

    exit_code = ExitCode.LEASE_HELD
