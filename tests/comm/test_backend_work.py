"""`Work` handles of a backend: `wait` that times out, and `is_completed`."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from weft.comm.in_flight import BackendCall, MessageCall


class LateWork:
    """A work that ends between the time-out of the first wait and the look at it; `error` is what
    it ended with.
    """

    def __init__(self, error: str | None) -> None:
        self.error, self.num_waits = error, 0

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return True


class MessageWork:
    """A message of gloo: incomplete until it is waited for; `arrive` lets it arrive, `error` makes
    it fail.
    """

    def __init__(self, error: str | None = None) -> None:
        self.error = error
        self.arrived = threading.Event()
        self.num_waits = 0

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self.num_waits += 1
        self.arrived.wait(timeout.total_seconds())
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return False


def test_a_collective_that_completes_just_after_a_wait_timed_out_is_complete() -> None:
    """On a busy machine a thread may be held up between the two; such a run ended with "did not
    arrive within 600 s".
    """
    assert BackendCall([LateWork(None)]).wait(0.01)


def test_a_collective_that_fails_just_after_a_wait_timed_out_raises_its_own_error() -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        BackendCall([LateWork("Connection closed by peer")]).wait(0.01)


def test_a_call_without_works_is_complete_and_finishes_once() -> None:
    finished = []
    call = BackendCall((), lambda: finished.append(True))
    assert call.is_completed()
    assert call.wait(0.0)
    assert call.wait(0.0)
    assert finished == [True]


def test_is_completed_of_a_message_is_true_once_it_arrived_and_waits_for_it_only_once() -> None:
    work = MessageWork()
    call = MessageCall([work])
    assert not call.is_completed()
    assert not call.wait(0.01)
    work.arrived.set()
    assert call.wait(10.0)
    assert call.is_completed()
    assert work.num_waits == 1


def test_a_message_that_fails_while_a_thread_waits_for_it_raises_its_error() -> None:
    work = MessageWork("Connection closed by peer")
    call = MessageCall([work])
    call.is_completed()
    work.arrived.set()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        call.wait(10.0)
