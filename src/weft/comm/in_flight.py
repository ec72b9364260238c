"""Calls in flight: the handles of torch.distributed backends, and what is known of the calls of a group while they run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch

from weft.comm.transport import Call, OnLate
from weft.core.mesh import rank_list
from weft.errors import CommError, CommTimeout, first_line

if TYPE_CHECKING:
    from weft.comm.world_store import PresenceStore  # scripts load it where a process joins a world

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
            # it holds the buffers, and runs once
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


def wait_for_works(call: BackendCall, timeout_s: float) -> None:
    """Block until the works of a collective are complete, or one has failed, for at most about
    `timeout_s`; any thread may do so, `BackendCall.wait` then tells how they ended.
    """
    with suppress(RuntimeError):
        for work in call.works:
            if not _wait_for_work(work, timeout_s):
                return


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


TIMEOUT_GRACE_S, LOST_GRACE_S = 0.1, 0.5
"""How long a rank looks for the others' announcements after a time-out and after a lost connection.
"""


class WatchedCall:
    """A call that the monitor may have to report.

    Attributes:
        position: place of the call in the order of its group, the same on all members.
        is_queued: whether the worker thread runs it; a wait for it waits for those before it, too.
        is_reported: whether the members that are late were reported.
        started_at_s, waiting_since_s: time.monotonic() of the start and of the current `wait`.
    """

    call: Call
    position: int
    on_late: OnLate
    started_at_s: float
    waiting_since_s: float
    is_queued = False
    is_reported = False


class DeviceCall(WatchedCall):
    """A call on a device, as the monitor sees it: without the tensors, from before its launch until
    the device has completed it.

    The first call of a communicator may block the host inside its launch until all members come, so
    a call is seen before it is launched.
    """

    def __init__(self, call: WatchedCall) -> None:
        self.call = replace(call.call, input=None, output=None)
        self.position, self.on_late = call.position, call.on_late
        self.started_at_s = self.waiting_since_s = call.started_at_s
        self._launched: BackendCall | None = None
        self._passed: torch.cuda.Event | None = None

    def launched(self, backend_call: BackendCall) -> None:
        """The backend has taken the call."""
        # without `finish`, which holds the tensors
        self._launched = BackendCall(backend_call.works)

    def waited_for(self, device: torch.device) -> None:
        """The caller's stream is ordered behind the call: an event there tells its completion, and
        the backend's handles go, since they hold the tensors of the call.
        """
        if device.type == "cuda":
            self._passed = torch.cuda.Event()
            # on the current stream, which the wait has just ordered behind the call
            self._passed.record()
            self._launched = None

    def is_completed(self) -> bool:
        """Whether the device has completed it; once it was waited for, all before the wait, too."""
        launched, passed = self._launched, self._passed  # `waited_for` sets the second one first
        if launched is not None:
            return launched.is_completed()
        return passed is not None and passed.query()


class DeviceCalls:
    """Calls of a group on a device, oldest first: added before their launch, dropped once the device
    has completed them. The launching thread and the monitor use it at once.

    They complete in the order of their start, since a communicator runs its kernels one after the
    other; one that is waited for late may be seen as completed late.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[DeviceCall] = deque()

    def add(self, calls: Sequence[WatchedCall]) -> list[DeviceCall]:
        """Note calls that are about to be launched."""
        added = [DeviceCall(call) for call in calls]
        with self._lock:
            self._drop_completed()
            self._calls.extend(added)
        return added

    def remove(self, calls: Sequence[DeviceCall]) -> None:
        """Forget calls whose launch failed."""
        with self._lock:
            for call in calls:
                self._calls.remove(call)

    def oldest(self) -> DeviceCall | None:
        """The oldest call that is not complete."""
        with self._lock:
            self._drop_completed()
            return self._calls[0] if self._calls else None

    def _drop_completed(self) -> None:
        while self._calls and self._calls[0].is_completed():
            self._calls.popleft()


@dataclass(eq=False)
class GroupWatch:
    """The calls of one group that are under way, and the members that have not joined them.

    Args:
        name: name of the group, the same on all members.
        presence: store by which the ranks of the world see which of them have joined a call.
        timeout_s: how long a call waits for other ranks.
        late_after_s: how long a call waits before members that have not joined are reported.
        announce_after_s: age of a collective at which this rank announces how many calls it has
            started.

    Attributes:
        in_flight, waiting: calls in the hands of the backend, and calls that a thread waits for.
        on_device: calls that a device has not completed.
        running: the call that the worker thread is in.
        num_started: calls that this rank has started.
        is_connected: whether the members have met.
        failure: why the connections of the group were closed; None while they are open.
    """

    name: str
    presence: PresenceStore
    _: KW_ONLY
    timeout_s: float
    late_after_s: float
    announce_after_s: float
    in_flight: set[WatchedCall] = field(default_factory=set, init=False)
    waiting: set[WatchedCall] = field(default_factory=set, init=False)
    on_device: DeviceCalls = field(default_factory=DeviceCalls, init=False)
    running: WatchedCall | None = field(default=None, init=False)
    num_started: int = field(default=0, init=False)
    is_connected: bool = field(default=False, init=False)
    failure: CommError | None = field(default=None, init=False)
    _announce_lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _num_announced: int = field(default=0, init=False)

    def check_progress(self, abort: Callable[[int], None]) -> None:
        """Announce this rank if a call has been in flight for a while; report late ranks of calls
        it waits for. Called from time to time by the monitor thread of the transport.

        Args:
            abort: fails what is in flight on a device; called with this rank's place in the group.
        """
        now_s = time.monotonic()
        self._check_device(now_s, abort)
        for call in list(self.in_flight):
            if now_s - call.started_at_s >= self.announce_after_s:
                self._announce(call.call)
        for call in list(self.waiting):
            waited_s = now_s - call.waiting_since_s
            if waited_s >= self.late_after_s:
                running = self.running if call.is_queued else None  # for which a queued one waits
                self._report_late(running or call, waited_s)

    def _check_device(self, now_s: float, abort: Callable[[int], None]) -> None:
        """Report the oldest unfinished call on a device; abort the group when it is too old."""
        oldest = self.on_device.oldest()
        if oldest is None:
            return
        age_s = now_s - oldest.started_at_s
        if age_s < self.announce_after_s:
            return
        self._announce(oldest.call)
        if age_s >= self.late_after_s:
            self._report_late(oldest, age_s)
        if age_s >= self.timeout_s and self.failure is None:
            self.diagnose(oldest, None)
            abort(oldest.call.index)

    def _report_late(self, late: WatchedCall, waited_s: float) -> None:
        """Report the members that have not joined, once; only the first rank of the group to see it
        does.
        """
        if late.is_reported:
            return
        missing = self._missing(late, within_s=0.0)
        if not missing:
            return
        late.is_reported = True
        pair = f"{late.call.ranks}/" if late.call.is_p2p else ""
        if self.presence.is_first(f"{self.name}/reported/{pair}{late.position}"):
            late.on_late(late.call, missing, waited_s)

    def _missing(self, late: WatchedCall, *, within_s: float) -> tuple[int, ...]:
        """Members that have not joined the call: its group is not connected, or they are not in the
        collective.
        """
        call = late.call
        if self.is_connected and call.is_p2p:
            return tuple(rank for rank in call.ranks if rank != call.rank)
        num_started = 1 + late.position if self.is_connected else 1
        return self.presence.missing(
            self.name, call.ranks, num_started=num_started, within_s=within_s
        )

    def diagnose(self, failed: WatchedCall, error: RuntimeError | None) -> CommError:
        """The error of a call that timed out (`error` None) or that the backend failed; later calls
        refer to it.
        """
        description = failed.call.description
        if self.failure is not None:
            cause = f"its connections were closed after an earlier failure: {self.failure}"
            return CommError(f"{description}: {cause}")
        self._announce(failed.call)
        if error is None or "imed out" in str(error):
            missing = self._missing(failed, within_s=TIMEOUT_GRACE_S)
            late = "all ranks arrived, but it did not complete"
            if missing:
                late = f"{rank_list(missing)} did not arrive"
            self.failure = CommTimeout(f"{description}: {late} within {self.timeout_s:g} s")
        else:
            missing = self._missing(failed, within_s=LOST_GRACE_S)
            lost = rank_list(missing) if missing else "a connection"
            self.failure = CommError(f"{description}: lost {lost} ({first_line(error)})")
        self.failure.missing = missing
        return self.failure

    def _announce(self, call: Call) -> None:
        """Let the other members see how many calls this rank has started; messages are not
        announced.
        """
        if call.is_p2p:
            return
        with self._announce_lock:  # the monitor and a waiting thread: the number must not decrease
            num_started = self.num_started
            if num_started > self._num_announced:
                self._num_announced = num_started
                self.presence.announce(self.name, call.rank, num_started)
