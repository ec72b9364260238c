"""Per-group call queue of processes: connects at the first call, compares signatures, names late ranks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from weft.comm.backend import ProcessGroupBackend
from weft.comm.backend_work import BackendCall
from weft.comm.device_calls import DeviceCalls
from weft.comm.group_call import GroupCall
from weft.comm.presence import PresenceStore
from weft.comm.transport import Call, OnLate
from weft.core.mesh import rank_list
from weft.errors import CommError, CommTimeout, first_line

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
        self._on_device = DeviceCalls()

    def start(self, call: Call, on_late: OnLate) -> GroupCall:
        """Start `call`: see Note [Order in a group queue]."""
        with self._lock:
            group_call = self._next_call(call, on_late)
            if group_call.policy.launches_from_caller:
                self._launch_on_device([group_call])
                return group_call
            backend = self._connected_backend(group_call.device_type)
            if backend is None or call.checked or self._num_queued:
                self._enqueue(group_call)
            else:
                group_call.launch(backend)
            return group_call

    def hold(self, call: Call, on_late: OnLate) -> GroupCall:
        """A message on a device that `launch_held` will launch."""
        with self._lock:
            return self._next_call(call, on_late)

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

    @property
    def failure(self) -> CommError | None:
        """Why the connections of the group were closed; None while they are open."""
        return self._failure

    def _next_call(self, call: Call, on_late: OnLate) -> GroupCall:
        position = self._num_started
        self._num_started += 1
        return GroupCall(
            self,
            call,
            position=position,
            on_late=on_late,
        )

    def _connected_backend(self, device_type: str) -> ProcessGroupBackend | None:
        """The backend, if the group is connected for tensors on a device type."""
        backend = self._backend
        if backend is None or device_type not in backend.connected:
            return None
        return backend

    def _launch_on_device(self, group_calls: Sequence[GroupCall]) -> None:
        """Launch one call, or messages together."""
        first = group_calls[0]
        if self._failure is not None:
            raise self.diagnose(first, None)
        device_calls = self._on_device.add(group_calls)
        try:
            launched_calls = self._launched(group_calls)
        except BaseException:
            self._on_device.remove(device_calls)
            raise
        launches = zip(
            group_calls,
            device_calls,
            launched_calls,
            strict=True,
        )
        for group_call, device_call, launched in launches:
            group_call.attach(launched)
            device_call.launched(launched)

    def _launched(self, group_calls: Sequence[GroupCall]) -> list[BackendCall]:
        first = group_calls[0]
        if self._connected_backend(first.device_type) is None:  # not in the plan: members meet here
            self._backend = self._connected(first.call, first.device_type)
        assert self._backend is not None, "it was connected"
        if not first.call.is_p2p:
            return [first.launch(self._backend)]
        calls = [group_call.call for group_call in group_calls]
        return self._backend.launch_messages(calls)

    def _check_device(self, now_s: float) -> None:
        """Report the oldest unfinished call on a device; abort the group when it is too old."""
        oldest = self._on_device.oldest()
        if oldest is None:
            return
        age_s = now_s - oldest.started_at_s
        if age_s < self.announce_after_s:
            return
        self._announce(oldest.call)
        if age_s >= self.late_after_s:
            oldest.group_call.report_late(age_s)
        if age_s >= self.timeout_s and self._failure is None:
            self.diagnose(oldest.group_call, None)
            if self._backend is not None:
                self._backend.abort(oldest.call.index)

    def shut_down(self) -> None:
        """End the communicators of devices, if all calls on them are complete; every member does."""
        is_unfinished = self._on_device.oldest() is not None
        if self._backend is None or is_unfinished or self._failure is not None:
            return
        self._backend.shut_down()

    def abort(self, index: int) -> None:
        """Fail what member `index`, this rank, has started and not waited for; let the worker
        thread end.
        """
        if self._backend is not None:
            is_busy = bool(self.in_flight or self._num_queued)
            has_devices = any(device_type != "cpu" for device_type in self._backend.connected)
            if is_busy or has_devices:
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
        now_s = time.monotonic()
        self._check_device(now_s)
        for group_call in list(self.in_flight):
            age_s = now_s - group_call.started_at_s
            if age_s >= self.announce_after_s:
                self._announce(group_call.call)
        for group_call in list(self.waiting):
            waited_s = now_s - group_call.waiting_since_s
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
        num_started = 1
        if is_connected:
            num_started += group_call.position
        return self.presence.missing(
            self.name,
            call.ranks,
            num_started=num_started,
            within_s=within_s,
        )

    def diagnose(self, group_call: GroupCall, error: RuntimeError | None) -> CommError:
        """The error of a call that timed out (`error` None) or that the backend failed; later calls
        refer to it.
        """
        description = group_call.call.description
        if self._failure is not None:
            cause = f"its connections were closed after an earlier failure: {self._failure}"
            return CommError(f"{description}: {cause}")
        self._announce(group_call.call)
        if error is None or "imed out" in str(error):
            missing = self.missing(group_call, within_s=TIMEOUT_GRACE_S)
            late = "all ranks arrived, but it did not complete"
            if missing:
                late = f"{rank_list(missing)} did not arrive"
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
        ):  # the monitor and the waiting thread: the number must not decrease
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
        backend = self._connected_backend(group_call.device_type)
        if backend is None:
            backend = self._connected(call, group_call.device_type)
            self._backend = backend
        if call.checked:
            comparison = backend.exchange_signatures(call)
            group_call.wait_for_backend(comparison)
        launched = group_call.launch(backend)
        group_call.wait_for_backend(launched)

    def _connected(self, call: Call, device_type: str) -> ProcessGroupBackend:
        try:
            backend = self._backend or self._connect()
            backend.process_group_for(device_type)
        except RuntimeError as error:
            what = f"{call.description}: the group cannot be connected: {error}"
            raise CommError(what) from error
        return backend
