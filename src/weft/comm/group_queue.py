"""The calls of one group of processes, in order: launched at once or by a worker thread that compares signatures first."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from weft.comm.backends import (
    GLOO,
    POLICIES,
    DeviceGroup,
    close_connections,
    launch_recv,
    launch_send,
)
from weft.comm.in_flight import (
    BackendCall,
    CheckedStreamCall,
    DeviceCall,
    GroupWatch,
    MessageCall,
    StreamCall,
    TorchWork,
    WatchedCall,
)
from weft.comm.shared_group import SharedGroup
from weft.comm.signature import (
    check_signatures,
    decode_signature,
    digests_agree,
    encode_signature,
    signature_digest,
)
from weft.comm.transport import Call, OnLate
from weft.errors import CommError, MismatchError

MAX_RANKS_COMPARED_BY_TEXT = 8
"""In larger groups, members compare digests of their signatures first."""
EXCHANGE_TIMEOUT_S = 60.0
SIGNATURE_TAG = 1


class ProcessGroupBackend:
    """The process groups of one group of ranks, one for each device type, and their calls.

    Args:
        connect: connects the group for a device type, on behalf of a call: a process group, or the
            group in shared memory; it may block until all members call it.

    Attributes:
        connected: device type -> its group, of those that are connected.
        is_aborted: whether `abort` was called: what calls on devices wrote is not to be used.
    """

    def __init__(self, connect: Callable[[str, Call], DeviceGroup | SharedGroup]) -> None:
        self.connected: dict[str, DeviceGroup | SharedGroup] = {}
        self.is_aborted = False
        self._connect = connect
        self._locks: dict[str, threading.Lock] = {}

    def carrier(self, device_type: str, call: Call) -> DeviceGroup | SharedGroup:
        """What carries tensors on a device type; connected when a call first needs it."""
        found = self.connected.get(device_type)
        if found is None:
            # A lock for each device type: a worker that connects the CPU must not hold up a device.
            with self._locks.setdefault(device_type, threading.Lock()):
                found = self.connected.get(device_type) or self._connect(device_type, call)
                self.connected[device_type] = found
        return found

    def group(self, device_type: str, call: Call) -> DeviceGroup:
        """The process group for tensors on a device type."""
        found = self.carrier(device_type, call)
        assert isinstance(found, DeviceGroup), "calls in shared memory do not come here"
        return found

    def launch_messages(self, calls: Sequence[Call]) -> list[BackendCall]:
        """Launch messages on the group of their axis: see Note [Messages on NCCL].

        A launch has at most one message to and one from each rank.
        """
        launched: list[BackendCall] = []
        for together in _without_repeated_pairs(calls):
            group = self.group(together[0].device.type, together[0])
            group.process_group._start_coalescing()
            for call in together:
                _add_message(group, call)
            work = group.process_group._end_coalescing()
            launched += [StreamCall([work]) for _ in together]
        return launched

    def launch_checked(self, call: Call, device: torch.device) -> BackendCall:
        """Hand `call` to the process group of its tensors, after a digest of its signature; waiting
        raises MismatchError.
        """
        own = signature_digest(call)
        total = own.to(device, copy=True)
        group = self.group(device.type, call)
        checking = group.process_group.allreduce([total], group.reduce_ops["sum"])
        launched = group.launch(call)

        def compare() -> None:
            total_on_host = total.cpu()
            if self.is_aborted:
                raise RuntimeError("aborted while signatures were compared")
            self._compare_with_total(call, own, total_on_host)

        return CheckedStreamCall(launched, checking, compare)

    def exchange_signatures(self, call: Call) -> BackendCall:
        """Compare the signature of `call` with those of all members; waiting for it raises
        MismatchError.

        In larger groups by digests first: see Note [Digests of signatures].
        """
        if len(call.ranks) > MAX_RANKS_COMPARED_BY_TEXT:
            return self._compare_digests(call)
        return self._exchange_texts(call)

    def _compare_digests(self, call: Call) -> BackendCall:
        own = signature_digest(call)
        total = own.clone()
        group = self.group("cpu", call)
        work = group.process_group.allreduce([total], group.reduce_ops["sum"])

        def compare() -> None:
            self._compare_with_total(call, own, total)

        return BackendCall([work], compare)

    def _compare_with_total(self, call: Call, own: Tensor, total: Tensor) -> None:
        """Raise MismatchError unless the digest of this member agrees with the sum of all.

        Every member sees the same sum, so all of them exchange texts, or none.
        """
        if digests_agree(own, total, len(call.ranks)):
            return
        texts = self._exchange_texts(call)
        texts.wait(EXCHANGE_TIMEOUT_S)
        raise MismatchError(
            f"over {call.axis}, ranks called different operations, shapes or dtypes; "
            f"this rank called {call.signature}"
        )

    def _exchange_texts(self, call: Call) -> BackendCall:
        size = len(call.ranks)
        own = encode_signature(call)
        received = own.new_empty(size, own.numel())

        def compare() -> None:
            signatures = [decode_signature(row, size) for row in received]
            check_signatures(call.axis, call.ranks, signatures)

        if not call.is_p2p:
            work = self.group("cpu", call).send_to_all(own, received.view(-1), size)
            return BackendCall([work], compare)
        peer = 1 - call.index
        received[call.index].copy_(own)
        gloo = self.group("cpu", call).process_group
        recv = gloo.recv([received[peer]], peer, SIGNATURE_TAG)
        send = gloo.send([own], peer, SIGNATURE_TAG)
        return MessageCall([recv, send], compare)

    def abort(self, index: int) -> None:
        """Fail what is in flight on devices, and on the CPU."""
        self.is_aborted = True
        for device_type, carrier in list(self.connected.items()):
            if isinstance(carrier, SharedGroup):
                carrier.abort()
            elif device_type != "cpu":
                carrier.process_group.abort()
        gloo = self.connected.get("cpu")
        if isinstance(gloo, DeviceGroup):
            close_connections(gloo.process_group, index)

    def shut_down(self) -> None:
        """End groups of devices whose calls are all complete; those of the CPU end by themselves."""
        for device_type in list(self.connected):
            if device_type != "cpu":
                carrier = self.connected.pop(device_type)
                assert isinstance(carrier, DeviceGroup), "shared memory is the CPU's"
                process_group = carrier.process_group
                end = getattr(process_group, "shutdown", process_group.abort)  # newer than abort
                end()


def _without_repeated_pairs(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """Consecutive messages, cut before one whose ordered pair of ranks has a message already."""
    together: list[Call] = []
    pairs: set[tuple[int, ...]] = set()
    for call in calls:
        if call.ranks in pairs:
            yield together
            together = []
            pairs.clear()
        together.append(call)
        pairs.add(call.ranks)
    if together:
        yield together


def _add_message(group: DeviceGroup, call: Call) -> TorchWork:
    """Start a message on the group of its axis."""
    sender, receiver = call.ranks
    if call.op == "send":
        return launch_send(group, call, to=call.members.index(receiver))
    return launch_recv(group, call, source=call.members.index(sender))


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
        backend: connects the group, and carries its calls; messages on the group of their axis share
            that of the group.
        watch: of the calls of the group.
    """

    def __init__(self, backend: ProcessGroupBackend, watch: GroupWatch) -> None:
        self.backend = backend
        self.watch = watch
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
            # under the lock together with the launch: the position says in which order the backend got it
            watch.num_started += 1
            if group_call.policy.launches_from_caller:
                self._launch_on_device([group_call])
                return group_call
            group = self.backend.connected.get(group_call.device_type)
            is_compared_before = call.checked and not (group and group.policy.compares_in_call)
            if group is None or is_compared_before or self._num_queued:
                self._enqueue(group_call)
            else:
                group_call.launched = group.launch(call)
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

    def connect(self, call: Call, device_type: str) -> DeviceGroup | SharedGroup:
        """Connect the group for tensors on a device type; blocks until all members have joined.

        Args:
            call: any call of the group, for its members.
        """
        try:
            carrier = self.backend.carrier(device_type, call)
        except RuntimeError as error:
            what = f"{call.description}: the group cannot be connected: {error}"
            raise CommError(what) from error
        self.watch.is_connected = True
        return carrier

    @property
    def carriers(self) -> frozenset[str]:
        """Names of what carries tensors of this group."""
        return frozenset(each.policy.name for each in list(self.backend.connected.values()))

    def check_progress(self) -> None:
        """Report what is late, and abort a device whose call is too old: the monitor thread of the
        transport calls it from time to time.
        """
        self.watch.check_progress(self.backend.abort)

    def shut_down(self) -> None:
        """End the communicators of devices, if all calls on them are complete; every member does."""
        is_unfinished = self.watch.on_device.oldest() is not None
        if not is_unfinished and self.watch.failure is None:
            self.backend.shut_down()

    def abort(self, index: int) -> None:
        """Fail what member `index`, this rank, has started and not waited for; let the worker
        thread end.
        """
        is_busy = bool(self.watch.in_flight or self._num_queued)
        if is_busy or any(device_type != "cpu" for device_type in self.backend.connected):
            self.backend.abort(index)
        self._queued.put(None)

    def join(self) -> None:
        """Return when the worker thread has ended: one that drops a backend while Python exits
        aborts the process.
        """
        if self._worker is not None:
            self._worker.join(CLOSE_WAIT_S)

    def _launch_on_device(self, group_calls: Sequence[GroupCall]) -> None:
        """Launch one call, or messages together."""
        first = group_calls[0]
        if self.watch.failure is not None:
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
        carrier = self.connect(first.call, first.device_type)  # if it was not in the plan
        if first.call.is_p2p:
            return self.backend.launch_messages([group_call.call for group_call in group_calls])
        if first.call.checked and first.policy.checks_on_device:
            return [self.backend.launch_checked(first.call, first.call.device)]
        return [carrier.launch(first.call)]

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
        call = group_call.call
        carrier = self.connect(call, group_call.device_type)
        if call.checked and not carrier.policy.compares_in_call:
            group_call.wait_for_backend(self.backend.exchange_signatures(call))
        group_call.launched = carrier.launch(call)
        group_call.wait_for_backend(group_call.launched)
