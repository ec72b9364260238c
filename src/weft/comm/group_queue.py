"""The calls of one group of processes, in order: launched at once or by a worker thread that compares signatures first."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from weft.comm.backend import ProcessGroupBackend
from weft.comm.backend_work import BackendCall
from weft.comm.backends import GLOO, OPERATIONS, POLICIES
from weft.comm.group import QueueKey
from weft.comm.group_watch import DeviceCall, GroupWatch, WatchedCall
from weft.comm.shared_group import SharedGroup, SharedProgress
from weft.comm.transport import Call, OnLate
from weft.comm.world_store import PresenceStore
from weft.errors import CommError

WAIT_SLICE_S = 0.25
"""A wait for a collective is made of waits of this length, so that Ctrl-C interrupts it."""
CLOSE_WAIT_S = 5.0
"""How long closing waits for the worker thread to end."""

# Note [Order in a group queue]
# Members of a group match calls by the order in which they start them. Three things would make `start` wait for other
# ranks: connecting the group at its first use, comparing signatures, and launching before the comparison is done (gloo
# aborts the process if sizes differ). Waiting there deadlocks correct programs: rank 0 starts an all_reduce and then
# sends, rank 1 receives and then starts the all_reduce. So these calls are queued for a worker thread, one per group,
# that runs them one after the other. A call is launched directly if the group is connected, its signature is not to be
# compared and no call is queued. In shared memory signatures are compared by the call itself: they are part of its
# rounds, which do not wait for others when they are started.
#
# Tensors on GPUs never come here: their calls are launched by the thread that starts them, on groups that were connected
# at start, and their signatures are compared without waiting. See Note [Calls on NCCL] in comm/backends.py.


class GroupCall(WatchedCall):
    """One call of a `GroupQueue`: run by its worker thread if queued, otherwise launched by the
    thread that starts it.

    Attributes:
        policy: how calls on the device type of its tensors are carried ("cpu" without any).
        launched: the call in the hands of the backend.
        on_device: what the monitor sees of it, if a device carries it.
        done, error: set by the worker thread; `done` is None if the call was launched directly.
    """

    def __init__(self, watch: GroupWatch, call: Call, *, position: int, on_late: OnLate) -> None:
        self.call, self.position, self.on_late = call, position, on_late
        self.started_at_s = self.waiting_since_s = time.monotonic()
        tensor = call.input if call.output is None else call.output
        self.device_type = "cpu" if tensor is None else tensor.device.type
        self.policy = POLICIES.get(self.device_type, GLOO)
        self.launched: BackendCall | None = None
        self.on_device: DeviceCall | None = None
        self.done: threading.Event | None = None
        self.error: Exception | None = None
        self._watch = watch

    def wait(self) -> None:
        """Block until the call is complete."""
        self.waiting_since_s = time.monotonic()
        self._watch.waiting.add(self)
        try:
            if self.done is not None:
                self.done.wait()  # the worker thread keeps the time-out
            else:
                assert self.launched is not None, "it is waited for inside its block of messages"
                self.wait_for_backend(self.launched)
                if self.on_device is not None:
                    self.on_device.waited_for(self.call.device)
        finally:
            self._watch.waiting.discard(self)
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if self.done is not None:
            return self.done.is_set()
        return self.launched is not None and self.launched.is_completed()

    def wait_for_backend(self, backend_call: BackendCall) -> None:
        """Block until `backend_call` is complete; raise the diagnosis if it fails or times out, or
        if its group was aborted: then its tensors hold anything.
        """
        watch = self._watch
        waits_once = backend_call.waits_once  # see Note [Messages on gloo]
        slice_s = watch.timeout_s if waits_once else min(WAIT_SLICE_S, watch.timeout_s)
        deadline_s = time.monotonic() + watch.timeout_s
        watch.in_flight.add(self)
        try:
            while not (is_complete := backend_call.wait(slice_s)):
                if waits_once or time.monotonic() > deadline_s:
                    break
        except RuntimeError as error:
            raise watch.diagnose(self, error) from error
        finally:
            watch.in_flight.discard(self)
        is_aborted = self.policy.is_stream_ordered and watch.failure is not None
        if is_aborted or not is_complete:
            raise watch.diagnose(self, None)


class GroupQueue:
    """Calls of one group of ranks (or of one ordered pair, for messages), in the order in which
    they were started.

    Args:
        connect: connects the group, for its first call; it may block until all members have joined.

    The others are those of `GroupWatch`.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[Call], ProcessGroupBackend],
        *,
        presence: PresenceStore,
        timeout_s: float,
        late_after_s: float,
        announce_after_s: float,
    ) -> None:
        self.watch = GroupWatch(
            name,
            presence,
            timeout_s=timeout_s,
            late_after_s=late_after_s,
            announce_after_s=announce_after_s,
        )
        self._connect = connect
        self._backend: ProcessGroupBackend | None = None
        self._lock = threading.Lock()
        self._num_queued = 0
        self._queued: queue.SimpleQueue[GroupCall | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None

    def start(self, call: Call, on_late: OnLate) -> GroupCall:
        """Start `call`: see Note [Order in a group queue]."""
        watch = self.watch
        if watch.presence.is_closed:
            raise CommError(f"{call.description}: this transport was closed")
        with self._lock:
            group_call = GroupCall(watch, call, position=watch.num_started, on_late=on_late)
            watch.num_started += 1
            if group_call.policy.launches_from_caller:
                self._launch_on_device([group_call])
                return group_call
            backend = self._backend
            group = None if backend is None else backend.connected.get(group_call.device_type)
            is_compared_before = call.checked and not (group and group.policy.compares_in_call)
            if group is None or is_compared_before or self._num_queued:
                self._enqueue(group_call)
            else:
                if isinstance(group, SharedGroup):
                    group_call.launched = group.launch(call)
                else:
                    group_call.launched = OPERATIONS[call.op](group, call)
                watch.in_flight.add(group_call)
            return group_call

    def hold(self, call: Call, on_late: OnLate) -> GroupCall:
        """A message on a device that `launch_held` will launch."""
        with self._lock:
            position = self.watch.num_started
            self.watch.num_started += 1
            return GroupCall(self.watch, call, position=position, on_late=on_late)

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
                self._connect_for(call, device_type)
            assert self._backend is not None, "it was connected"
            return self._backend

    @property
    def is_connected(self) -> bool:
        """Whether the members have met."""
        return self.watch.is_connected

    @property
    def carriers(self) -> frozenset[str]:
        """Names of what carries tensors of this group."""
        connected = {} if self._backend is None else dict(self._backend.connected)
        return frozenset(carrier.policy.name for carrier in connected.values())

    @property
    def failure(self) -> CommError | None:
        """Why the connections of the group were closed; None while they are open."""
        return self.watch.failure

    @property
    def oldest_on_device(self) -> DeviceCall | None:
        """The oldest call that a device has not completed."""
        return self.watch.on_device.oldest()

    def check_progress(self) -> None:
        """Report what is late, and abort a device whose call is too old: the monitor thread of the
        transport calls it from time to time.
        """
        self.watch.check_progress(self._abort_backend)

    def shut_down(self) -> None:
        """End the communicators of devices, if all calls on them are complete; every member does."""
        is_unfinished = self.oldest_on_device is not None
        if self._backend is not None and not is_unfinished and self.failure is None:
            self._backend.shut_down()

    def abort(self, index: int) -> None:
        """Fail what member `index`, this rank, has started and not waited for; let the worker
        thread end.
        """
        if self._backend is not None:
            is_busy = bool(self.watch.in_flight or self._num_queued)
            if is_busy or any(device_type != "cpu" for device_type in self._backend.connected):
                self._backend.abort(index)
        self._queued.put(None)

    def join(self) -> None:
        """Return when the worker thread has ended: one that drops a backend while Python exits
        aborts the process.
        """
        if self._worker is not None:
            self._worker.join(CLOSE_WAIT_S)

    def _abort_backend(self, index: int) -> None:
        if self._backend is not None:
            self._backend.abort(index)

    def _launch_on_device(self, group_calls: Sequence[GroupCall]) -> None:
        """Launch one call, or messages together."""
        first = group_calls[0]
        if self.failure is not None:
            raise self.watch.diagnose(first, None)
        device_calls = self.watch.on_device.add(group_calls)
        try:
            launched_calls = self._launched(group_calls)
        except BaseException:
            self.watch.on_device.remove(device_calls)
            raise
        for group_call, device_call, launched in zip(
            group_calls, device_calls, launched_calls, strict=True
        ):
            group_call.launched = launched
            group_call.on_device = device_call
            device_call.launched(launched)
            if not group_call.policy.is_stream_ordered:
                self.watch.in_flight.add(group_call)

    def _launched(self, group_calls: Sequence[GroupCall]) -> list[BackendCall]:
        first = group_calls[0]
        backend = self._connect_for(first.call, first.device_type)  # if it was not in the plan
        if first.call.is_p2p:
            return backend.launch_messages([group_call.call for group_call in group_calls])
        if first.call.checked and first.policy.checks_on_device:
            return [backend.launch_checked(first.call, first.call.device)]
        return [backend.launch(first.call, first.device_type)]

    def _enqueue(self, group_call: GroupCall) -> None:
        group_call.done = threading.Event()
        group_call.is_queued = True
        self._num_queued += 1
        if self._worker is None:
            self._worker = threading.Thread(
                target=self._work, name=f"weft {self.watch.name}", daemon=True
            )
            self._worker.start()
        self._queued.put(group_call)

    def _work(self) -> None:
        """Worker thread: run queued calls one after the other, until None."""
        for group_call in iter(self._queued.get, None):
            self.watch.running = group_call
            try:
                self._run(group_call)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the call
                group_call.error = error
            self.watch.running = None
            with self._lock:
                self._num_queued -= 1
            done = group_call.done
            del group_call  # its tensors would live until the next call otherwise
            assert done is not None, "queued calls have an event"
            done.set()

    def _run(self, group_call: GroupCall) -> None:
        call, device_type = group_call.call, group_call.device_type
        backend = self._connect_for(call, device_type)
        if call.checked and not backend.carrier(device_type).policy.compares_in_call:
            group_call.wait_for_backend(backend.exchange_signatures(call))
        group_call.launched = backend.launch(call, device_type)
        group_call.wait_for_backend(group_call.launched)

    def _connect_for(self, call: Call, device_type: str) -> ProcessGroupBackend:
        """The backend, connected for tensors on a device type."""
        backend = self._backend
        if backend is not None and device_type in backend.connected:
            return backend
        try:
            backend = backend or self._connect(call)
            backend.carrier(device_type)
        except RuntimeError as error:
            what = f"{call.description}: the group cannot be connected: {error}"
            raise CommError(what) from error
        self._backend = backend
        self.watch.is_connected = True
        return backend


class DeviceReports:
    """Where the monitor thread of a transport reports the call that the device is in.

    Attributes:
        report: see `CarriesOnDevice.report_device_calls`; None: nothing is reported.
    """

    def __init__(self) -> None:
        self.report: Callable[[Call | None], None] | None = None

    def update(self, queues: Iterable[GroupQueue]) -> None:
        """Report the oldest call of all groups that the device has not completed."""
        if self.report is None:
            return
        found = [call for queue in queues if (call := queue.oldest_on_device) is not None]
        oldest = min(found, key=lambda call: call.started_at_s, default=None)
        self.report(None if oldest is None else oldest.call)


def watch_queues(
    queues: Mapping[QueueKey, GroupQueue],
    closing: threading.Event,
    reports: DeviceReports,
    *,
    interval_s: float,
    device: torch.device,
) -> None:
    """Monitor thread of a transport: announces this rank's calls and reports late ranks and the call
    that the device is in, until `closing` is set.
    """
    if device.type == "cuda":  # else its questions to CUDA would open a context on the first GPU
        torch.cuda.set_device(device)
    is_store_lost = False
    while not closing.wait(interval_s):
        watched = list(queues.values())
        reports.update(watched)
        for group_queue in () if is_store_lost else watched:
            try:
                group_queue.check_progress()
            except RuntimeError:
                is_store_lost = True  # calls report what they wait for when they fail
                break
    reports.update(())


def close_queues(
    presence: PresenceStore,
    queues: dict[QueueKey, GroupQueue],
    rank: int,
    *,
    monitor: threading.Thread,
    closing: threading.Event,
    progress: SharedProgress,
) -> None:
    presence.is_closed = True
    closing.set()
    for (_, ranks), group_queue in queues.items():
        group_queue.abort(ranks.index(rank))
    for group_queue in queues.values():
        group_queue.join()
    progress.close()
    if monitor.ident is not None and monitor is not threading.current_thread():
        monitor.join()
    queues.clear()
