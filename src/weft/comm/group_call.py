"""One call of a group of processes: queued for the worker thread or launched at once, waited for, named when it is late."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Protocol

from weft.comm.backend import ProcessGroupBackend
from weft.comm.backend_policy import policy_of
from weft.comm.backend_work import BackendCall
from weft.comm.presence import PresenceStore
from weft.comm.transport import Call, OnLate
from weft.errors import CommError

WAIT_SLICE_S = 0.25
"""A wait for a collective is made of waits of this length, so that Ctrl-C interrupts it."""


class CallQueue(Protocol):
    """What a call needs of its `GroupQueue`."""

    name: str
    presence: PresenceStore
    timeout_s: float
    in_flight: set[GroupCall]
    waiting: set[GroupCall]

    @property
    def failure(self) -> CommError | None: ...
    def diagnose(self, group_call: GroupCall, error: RuntimeError | None) -> CommError: ...
    def missing(self, group_call: GroupCall, *, within_s: float) -> tuple[int, ...]: ...


class GroupCall:
    """One call of a `GroupQueue`: run by its worker thread if queued, otherwise launched by the
    thread that starts it.

    Attributes:
        position: place of the call in the order of its group, the same on all members.
        device_type: of its tensors; "cpu" without any.
        policy: how calls on that device type are carried.
        done, error: set by the worker thread; `done` is None if the call was launched directly.
        started_at_s, waiting_since_s: time.monotonic() of the start and of the current `wait`.
    """

    def __init__(
        self,
        group_queue: CallQueue,
        call: Call,
        *,
        position: int,
        on_late: OnLate,
    ) -> None:
        self.queue = group_queue
        self.call = call
        self.position = position
        self.device_type = call.device.type
        self.policy = policy_of(self.device_type)
        self.done: threading.Event | None = None
        self.error: Exception | None = None
        self.started_at_s = time.monotonic()
        self.waiting_since_s = self.started_at_s
        self.on_late = on_late
        self._backend_call: BackendCall | None = None
        self._is_reported = False

    def launch(self, backend: ProcessGroupBackend) -> BackendCall:
        """Hand the call to the backend."""
        call = self.call
        if call.checked and self.policy.checks_on_device:
            launched = backend.launch_checked(call, call.device)
        else:
            launched = backend.launch(call)
        self._backend_call = launched
        if not self.policy.is_stream_ordered:
            self.queue.in_flight.add(self)
        return launched

    def attach(self, launched: BackendCall) -> None:
        """The call was launched with others."""
        self._backend_call = launched

    def wait(self) -> None:
        """Block until the call is complete."""
        self.waiting_since_s = time.monotonic()
        self.queue.waiting.add(self)
        try:
            if self.done is not None:
                self.done.wait()  # the worker thread keeps the time-out
            else:
                assert self._backend_call is not None, "it is waited for inside its group"
                self.wait_for_backend(self._backend_call)
        finally:
            self.queue.waiting.discard(self)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if self.done is not None:
            return self.done.is_set()
        return self._backend_call is not None and self._backend_call.is_completed()

    def wait_for_backend(self, backend_call: BackendCall) -> None:
        """Block until `backend_call` is complete; raise the diagnosis if it fails or times out, or
        if its group was aborted: then its tensors hold anything.
        """
        self.queue.in_flight.add(self)
        try:
            is_complete = self._wait_in_slices(backend_call)
        except RuntimeError as error:
            raise self.queue.diagnose(self, error) from error
        finally:
            self.queue.in_flight.discard(self)
        is_aborted = self.policy.is_stream_ordered and self.queue.failure is not None
        if is_aborted or not is_complete:
            raise self.queue.diagnose(self, None)

    def report_late(self, waited_s: float) -> None:
        """Report the members that have not joined, once; only the first rank of the group to see it
        does.
        """
        if self._is_reported:
            return
        missing = self.queue.missing(self, within_s=0.0)
        if not missing:
            return
        self._is_reported = True
        pair = f"{self.call.ranks}/" if self.call.is_p2p else ""
        key = f"{self.queue.name}/reported/{pair}{self.position}"
        if self.queue.presence.is_first(key):
            self.on_late(self.call, missing, waited_s)

    def _wait_in_slices(self, backend_call: BackendCall) -> bool:
        timeout_s = self.queue.timeout_s
        if self.call.is_p2p:  # a message has one wait: see Note [Messages on gloo]
            return backend_call.wait(timeout_s)
        slice_s = min(WAIT_SLICE_S, timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while not backend_call.wait(slice_s):
            if time.monotonic() > deadline_s:
                return False
        return True


class DeviceCall:
    """A call on a device, as the monitor sees it: without the tensors, from before its launch until
    the device has completed it.

    The first call of a communicator may block the host inside its launch until all members come, so
    a call is seen before it is launched.
    """

    def __init__(self, group_call: GroupCall) -> None:
        self.call = replace(group_call.call, input=None, output=None)
        self.started_at_s = group_call.started_at_s
        self.group_call = GroupCall(
            group_call.queue,
            self.call,
            position=group_call.position,
            on_late=group_call.on_late,
        )
        self._launched: BackendCall | None = None

    def launched(self, backend_call: BackendCall) -> None:
        """The backend has taken the call."""
        self._launched = BackendCall(backend_call.works)

    def is_completed(self) -> bool:
        """Whether the device has completed it."""
        return self._launched is not None and self._launched.is_completed()
