"""Per-group call queue of processes: connects at the first call, compares signatures, names late ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.comm.backend import ProcessGroupBackend
from weft.comm.backend_policy import policy_of
from weft.comm.backend_work import BackendCall
from weft.comm.presence import PresenceStore
from weft.comm.signature import rank_list
from weft.comm.transport import Call, OnLate
from weft.errors import CommError, CommTimeout, first_line

WAIT_SLICE_S = 0.25
"""A wait for a collective is made of waits of this length, so that Ctrl-C interrupts it."""

TIMEOUT_GRACE_S, LOST_GRACE_S = 0.1, 0.5
"""How long a rank looks for the others' announcements after a time-out and after a lost connection.
"""

CLOSE_WAIT_S = 5.0
"""How long closing waits for the worker thread to end."""

# Note [Order in a group queue]
# Members of a group match calls by the order in which they start them. Three things would make `start` wait for other
# ranks: connecting the group at its first use, comparing signatures, and launching before the comparison is done (gloo
# aborts the process if sizes differ). Waiting there deadlocks correct programs: rank 0 starts an all_reduce and then
# sends, rank 1 receives and then starts the all_reduce. So these calls are queued for a worker thread, one per group,
# that runs them one after the other. A call is launched directly if the group is connected, its signature is not to be
# compared and no call is queued.
#
# Tensors on GPUs never come here: their calls are launched by the thread that starts them, on groups that were connected
# at start, and their signatures are compared without waiting. See Note [Calls on NCCL] in comm/backend_policy.py.


class GroupQueue:
    """Calls of one group of ranks (or of one ordered pair, for messages), in the order in which
    they were started.

    Args:
        name: name of the group, the same on all members.
        connect: connects the group; it may block until all members have joined.
        presence: store by which the ranks of the world see which of them have joined a call.
        timeout_s: how long a call waits for other ranks.
        late_after_s: how long a call waits before members that have not joined are reported.
        announce_after_s: age of a collective at which this rank announces how many calls it has
            started.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], ProcessGroupBackend],
        *,
        presence: PresenceStore,
        timeout_s: float,
        late_after_s: float,
        announce_after_s: float,
    ) -> None:
        self.name = name
        self.presence = presence
        self.timeout_s = timeout_s
        self.late_after_s = late_after_s
        self.announce_after_s = announce_after_s
        self.in_flight: set[GroupCall] = set()
        self.waiting: set[GroupCall] = set()
        self._connect = connect
        self._backend: ProcessGroupBackend | None = None
        self._failure: CommError | None = None
        self._lock = threading.Lock()
        self._announce_lock = threading.Lock()
        self._num_started = 0
        self._num_announced = 0
        self._num_queued = 0
        self._queued: queue.SimpleQueue[GroupCall | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._running: GroupCall | None = None
        self._on_device: deque[DeviceCall] = deque()

    def start(self, call: Call, on_late: OnLate) -> GroupCall:
        """Start `call`: see Note [Order in a group queue]."""
        with self._lock:
            group_call = GroupCall(self, call, position=self._num_started, on_late=on_late)
            self._num_started += 1
            if group_call.policy.launches_from_caller:
                self._launch_on_device([group_call])
            elif self._backend is None or call.checked or self._num_queued:
                self._enqueue(group_call)
            else:
                group_call.launch(self._backend)
            return group_call

    def hold(self, call: Call, on_late: OnLate) -> GroupCall:
        """A message on a device that `launch_held` will launch."""
        with self._lock:
            group_call = GroupCall(self, call, position=self._num_started, on_late=on_late)
            self._num_started += 1
            return group_call

    def launch_held(self, group_calls: Sequence[GroupCall]) -> None:
        """Launch messages together."""
        with self._lock:
            self._launch_on_device(group_calls)

    def connect(self, call: Call, device_type: str) -> ProcessGroupBackend:
        """Connect the group for tensors on a device type; blocks until all members have joined.

        Args:
            call: any call of the group, for its members.
        """
        with self._lock:
            if self._backend is None:
                self._backend = self._connected(call, device_type)
            return self._backend

    @property
    def is_connected(self) -> bool:
        """Whether the members have met."""
        return self._backend is not None

    def _launch_on_device(self, group_calls: Sequence[GroupCall]) -> None:
        """Launch one call, or messages together."""
        first = group_calls[0]
        if self._failure is not None:
            raise self.diagnose(first, None)
        if self._backend is None:  # not in the plan: the members meet here
            self._backend = self._connected(first.call, first.device_type)
        if first.call.is_p2p:
            self._launch_messages(group_calls, self._backend)
        else:
            self._on_device.append(DeviceCall(first, first.launch(self._backend)))
        self._drop_completed()

    def _launch_messages(
        self, group_calls: Sequence[GroupCall], backend: ProcessGroupBackend
    ) -> None:
        calls = [group_call.call for group_call in group_calls]
        launched_calls = backend.launch_messages(calls)
        for group_call, launched in zip(group_calls, launched_calls, strict=True):
            group_call.attach(launched)
            self._on_device.append(DeviceCall(group_call, launched))

    def _drop_completed(self) -> None:
        """Forget the calls on a device that are complete; they complete in the order of their start."""
        while self._on_device and self._on_device[0].is_completed():
            self._on_device.popleft()

    def _check_device(self, now_s: float) -> None:
        """Report the oldest unfinished call on a device; abort the group when it is too old."""
        with self._lock:
            self._drop_completed()
            if not self._on_device:
                return
            oldest = self._on_device[0]
        age_s = now_s - oldest.started_at_s
        if age_s < self.announce_after_s:
            return
        self._announce(oldest.call)
        if age_s >= self.late_after_s:
            oldest.group_call.report_late(age_s)
        if age_s >= self.timeout_s and self._failure is None:
            self.diagnose(oldest.group_call, None)
            assert self._backend is not None, "a call was launched"
            self._backend.abort(oldest.call.index)

    def abort(self, index: int) -> None:
        """Fail what member `index`, this rank, has started and not waited for; let the worker
        thread end.
        """
        is_busy = bool(self.in_flight or self._num_queued or self._on_device)
        if self._backend is not None and is_busy:
            self._backend.abort(index)
        self._queued.put(None)

    def join(self) -> None:
        """Return when the worker thread has ended: one that drops a backend while Python exits
        aborts the process.
        """
        if self._worker is not None:
            self._worker.join(CLOSE_WAIT_S)

    def check_progress(self) -> None:
        """Announce this rank if a call has been in flight for a while; report late ranks of calls
        it waits for.

        Called from time to time by the monitor thread of the transport.
        """
        now = time.monotonic()
        self._check_device(now)
        for group_call in list(self.in_flight):
            age_s = now - group_call.started_at_s
            if age_s >= self.announce_after_s:
                self._announce(group_call.call)
        for group_call in list(self.waiting):
            waited_s = now - group_call.waiting_since_s
            if waited_s >= self.late_after_s:
                blocking = self._blocking(group_call)
                blocking.report_late(waited_s)

    def missing(self, group_call: GroupCall, *, within_s: float) -> tuple[int, ...]:
        """Members that have not joined `group_call`: its group is not connected, or they are not in
        the collective.
        """
        call = group_call.call
        is_connected = self._backend is not None
        if is_connected and call.is_p2p:
            return tuple(rank for rank in call.ranks if rank != call.rank)
        num_started = group_call.position + 1 if is_connected else 1
        return self.presence.missing(
            self.name, call.ranks, num_started=num_started, within_s=within_s
        )

    def diagnose(self, group_call: GroupCall, error: RuntimeError | None) -> CommError:
        """The error of a call that timed out (`error` None) or that the backend failed; later calls
        refer to it.
        """
        description = group_call.call.description
        if self._failure is not None:
            return CommError(
                f"{description}: its connections were closed after an earlier failure: {self._failure}"
            )
        self._announce(group_call.call)
        if error is None or "imed out" in str(error):
            missing = self.missing(group_call, within_s=TIMEOUT_GRACE_S)
            late = (
                f"{rank_list(missing)} did not arrive"
                if missing
                else "all ranks arrived, but it did not complete"
            )
            self._failure = CommTimeout(f"{description}: {late} within {self.timeout_s:g} s")
        else:
            missing = self.missing(group_call, within_s=LOST_GRACE_S)
            lost = rank_list(missing) if missing else "a connection"
            reason = first_line(error)
            self._failure = CommError(f"{description}: lost {lost} ({reason})")
        self._failure.missing = missing
        return self._failure

    def _announce(self, call: Call) -> None:
        """Let the other members see how many calls this rank has started; messages are not
        announced.
        """
        if call.is_p2p:
            return
        with (
            self._announce_lock
        ):  # the monitor and the waiting thread announce: the number must not decrease
            num_started = self._num_started
            if num_started > self._num_announced:
                self._num_announced = num_started
                self.presence.announce(self.name, call.rank, num_started)

    def _blocking(self, group_call: GroupCall) -> GroupCall:
        """The call that `group_call` waits for: itself, or the running one if it is still queued."""
        if group_call.done is None:
            return group_call
        return self._running or group_call

    def _enqueue(self, group_call: GroupCall) -> None:
        group_call.done = threading.Event()
        self._num_queued += 1
        if self._worker is None:
            self._worker = threading.Thread(
                target=self._work,
                name=f"weft {self.name}",
                daemon=True,
            )
            self._worker.start()
        self._queued.put(group_call)

    def _work(self) -> None:
        """Worker thread: run queued calls one after the other, until None."""
        for group_call in iter(self._queued.get, None):
            self._running = group_call
            try:
                self._run(group_call)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the call
                group_call.error = error
            self._running = None
            with self._lock:
                self._num_queued -= 1
            done = group_call.done
            del group_call  # its tensors would live until the next call otherwise
            assert done is not None, "queued calls have an event"
            done.set()

    def _run(self, group_call: GroupCall) -> None:
        call = group_call.call
        if self._backend is None:
            self._backend = self._connected(call, group_call.device_type)
        if call.checked:
            group_call.wait_for_backend(self._backend.exchange_signatures(call))
        group_call.wait_for_backend(group_call.launch(self._backend))

    def _connected(self, call: Call, device_type: str) -> ProcessGroupBackend:
        try:
            backend = self._connect()
            backend.process_group_for(device_type)
        except RuntimeError as error:
            raise CommError(
                f"{call.description}: the group cannot be connected: {error}"
            ) from error
        return backend


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
        group_queue: GroupQueue,
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
        if self.call.checked and self.policy.checks_on_device:
            self._backend_call = backend.launch_checked(self.call, self.call.device)
        else:
            self._backend_call = backend.launch(self.call)
        if not self.policy.is_stream_ordered:
            self.queue.in_flight.add(self)
        return self._backend_call

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
        """Block until `backend_call` is complete; raise the diagnosis if it fails or times out."""
        self.queue.in_flight.add(self)
        try:
            is_complete = self._wait_in_slices(backend_call)
        except RuntimeError as error:
            raise self.queue.diagnose(self, error) from error
        finally:
            self.queue.in_flight.discard(self)
        if not is_complete:
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
        if self.call.is_p2p:
            return backend_call.wait(
                timeout_s
            )  # a message has one wait: see Note [Messages on gloo]
        deadline = time.monotonic() + timeout_s
        while not backend_call.wait(min(WAIT_SLICE_S, timeout_s)):
            if time.monotonic() > deadline:
                return False
        return True


class DeviceCall:
    """A call that runs on a device: what the monitor needs, without the tensors of the call."""

    def __init__(self, group_call: GroupCall, launched: BackendCall) -> None:
        self.call = replace(group_call.call, input=None, output=None)
        self.started_at_s = group_call.started_at_s
        self.group_call = GroupCall(
            group_call.queue,
            self.call,
            position=group_call.position,
            on_late=group_call.on_late,
        )
        self._works = tuple(launched.works)

    def is_completed(self) -> bool:
        """Whether the device has completed it."""
        return all(work.is_completed() for work in self._works)
