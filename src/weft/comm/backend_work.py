"""Calls in flight on a torch.distributed backend: waiting with a time limit, and completion of gloo, NCCL and messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Protocol

COMPLETION_POLL_S = 0.001
"""How long `MessageCall.is_completed` waits for its thread, so that a message that has arrived is
seen as such.
"""

MESSAGE_LIMIT_S = 3600.0
"""How long the thread behind `MessageCall.is_completed` waits for a message."""


class TorchWork(Protocol):
    """The part of torch.distributed.Work that is used; `wait` raises RuntimeError on failure and on
    time-out.
    """

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


class BackendCall:
    """The works of one collective, and the local computation to do once they are complete.

    Args:
        works: handles of the backend; none for a call that moves no bytes.
        finish: called once, by the first `wait` that finds all works complete.
    """

    waits_once = False
    """Whether a `wait` that returns False has ended the call."""

    def __init__(
        self, works: Sequence[TorchWork], finish: Callable[[], object] | None = None
    ) -> None:
        self.works = works
        self.finish = finish

    def wait(self, timeout_s: float) -> bool:
        """Block for at most `timeout_s`; whether the call is complete. It may be called again if
        not.

        Raises:
            RuntimeError: the backend failed.
        """
        for work in self.works:
            if not _wait_for_work(work, timeout_s):
                return False
        self._finish_once()
        return True

    def is_completed(self) -> bool:
        """Whether the backend reports all works as complete."""
        return all(work.is_completed() for work in self.works)

    def _finish_once(self) -> None:
        if self.finish is not None:
            self.finish()
            self.finish = None


class StreamCall(BackendCall):
    """Works on an accelerator: waiting orders the caller's stream after them and does not block the
    caller.

    The backend keeps the time-out itself there: a wait with a time-out would block the caller until
    the device is done.
    """

    def wait(self, timeout_s: float) -> bool:
        """Order the caller's stream after the call; True."""
        for work in self.works:
            work.wait()
        self._finish_once()
        return True


class CheckedStreamCall(StreamCall):
    """A call on an accelerator whose signature is compared: `wait` reads the comparison, which was
    launched before the call and completes whether or not the call can.

    Args:
        launched: the call itself.
        checking: the reduction of the digests.
        compare: raises MismatchError; called once, after `checking`.
    """

    def __init__(
        self, launched: BackendCall, checking: TorchWork, compare: Callable[[], None]
    ) -> None:
        super().__init__((checking, *launched.works), launched.finish)
        self._checking = checking
        self._compare = compare

    def wait(self, timeout_s: float) -> bool:
        """Read the comparison, then order the caller's stream after the call; True."""
        self._checking.wait()
        self._compare()
        return super().wait(timeout_s)


# Note [Messages on gloo]
# A send or recv of gloo does not complete before it is waited for (`is_completed` stays False), and a wait that times
# out closes every connection of its group. So a message is waited for once, for as long as the group allows; for
# `is_completed` a thread waits instead. The handle must live until then, or the message is lost.


class MessageCall(BackendCall):
    """Sends and recvs that belong together: see Note [Messages on gloo]."""

    waits_once = True

    def __init__(
        self, works: Sequence[TorchWork], finish: Callable[[], object] | None = None
    ) -> None:
        super().__init__(works, finish)
        self._waiting_thread: futures.Future[None] | None = None

    def is_completed(self) -> bool:
        """Whether the messages have been exchanged; starts a thread that waits for them."""
        if self._waiting_thread is None:
            self._waiting_thread = _run_in_thread(lambda: self._wait_once(MESSAGE_LIMIT_S))
        futures.wait((self._waiting_thread,), timeout=COMPLETION_POLL_S)
        return self._waiting_thread.done()

    def wait(self, timeout_s: float) -> bool:
        """Block until the messages have been exchanged; whether they were within `timeout_s`."""
        if self._waiting_thread is None:
            self._wait_once(timeout_s)
        else:
            try:
                self._waiting_thread.result(timeout_s)
            except futures.TimeoutError:
                return False
        self._finish_once()
        return True

    def _wait_once(self, timeout_s: float) -> None:
        for work in self.works:
            work.wait(timedelta(seconds=timeout_s))


def _wait_for_work(work: TorchWork, timeout_s: float) -> bool:
    """Whether `work` completes within `timeout_s`; a wait of a collective that times out leaves the
    group usable.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return work.wait(timeout)
    except RuntimeError:
        if not work.is_completed():
            return False  # only this wait timed out
    return work.wait(
        timeout
    )  # it failed, or it completed since the time-out: this wait raises or returns True


def _run_in_thread(function: Callable[[], None]) -> futures.Future[None]:
    """Start a daemon thread that runs `function`; a pool of futures.Executor would block the exit
    of the program.
    """
    result: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            function()
        except RuntimeError as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, name="weft message", daemon=True).start()
    return result
