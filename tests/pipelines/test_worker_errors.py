"""Exceptions keep their class where that is possible, and their message always."""

from __future__ import annotations

import pickle

from dflash_core.errors import ExitCode, LeaseHeldError
from pipelines.worker_errors import WorkerError
from tests.pipelines.ray_workers import TwoPartError


def travelled(error: Exception) -> Exception:
    """What arrives after the way through another process."""

    def fail() -> None:
        raise error

    try:
        fail()
    except Exception as caught:
        sent: WorkerError = pickle.loads(pickle.dumps(WorkerError.of(caught)))
    return sent.original()


def test_class_message_exit_code_and_origin_arrive() -> None:
    arrived = travelled(LeaseHeldError("held by another run: wait for it"))
    assert type(arrived) is LeaseHeldError
    assert str(arrived) == "held by another run: wait for it"
    assert arrived.exit_code is ExitCode.LEASE_HELD
    assert "in fail" in arrived.__notes__[0]


def test_a_class_that_does_not_come_back_from_a_pickle_keeps_its_name_and_message() -> None:
    arrived = travelled(TwoPartError("it broke", "rust"))
    assert type(arrived) is RuntimeError
    assert str(arrived) == "TwoPartError: it broke because of rust"
    assert "in fail" in arrived.__notes__[0]
