"""Process transport: one rank per process, over gloo and NCCL."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.comm.backends import GLOO, DeviceGroup, NcclGroups, TorchProcessGroup, policy_of
from weft.comm.group import PlannedGroup, QueueKey
from weft.comm.group_queue import GroupCall, GroupQueue, ProcessGroupBackend
from weft.comm.hosts_group import HostsGroup
from weft.comm.in_flight import GroupWatch
from weft.comm.local_peers import LocalPeers, Meeting, all_share, meet, members_a_host
from weft.comm.shared_group import SharedGroup, SharedProgress
from weft.comm.transport import Call, Communicator, OnLate, Reduce
from weft.comm.world_store import (
    PollingStore,
    PresenceStore,
    agree_on_namespace,
    find_store,
    next_namespace,
)
from weft.errors import CommError, Fault, LaunchError

# Note [Groups without a registry]
# Process groups are made here one by one and not by `dist.new_group`, which keeps names and counters for the whole
# process and must not be called from two threads. A process group needs nothing but a store in which its members find
# each other. So on the CPU each group is connected when it is first used, in whatever order its members come to it. On
# GPUs the groups of the plan are connected at start, in one order: see Note [Calls on NCCL]. Several transports may exist
# in one process, beside a world of torch.distributed's own.

LATE_AFTER_S = 10.0
"""How long a rank waits in a call before members that have not joined it are reported; see
`Comm.on_late`.
"""

MONITOR_INTERVAL_S = 0.25
"""How often the monitor thread looks at the calls of a rank, unless `late_after_s` is short."""

GLOO_THREADS = 2
_REDUCE_OPS: dict[Reduce, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}
SCRIPT_WORLD = "torch.distributed"
"""Rendezvous: the world that the script has initialised torch.distributed with."""


def script_world() -> tuple[int, int] | None:
    """Rank and size of the world that the script has initialised torch.distributed with; None if it has
    not.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


class ProcessTransport:
    """This process's rank in a world of processes.

    Args:
        rendezvous: a torch Store that all ranks share, or where to find one: "env://" (the
            variables that torchrun sets), "tcp://host:port" (rank 0 listens there),
            "file:///path" (a file that does not exist yet) or SCRIPT_WORLD.
        device: where this rank computes. Tensors on the CPU travel over gloo, tensors on a CUDA
            device over NCCL.
        timeout_s: how long a rank waits for the others.
        late_after_s: how long a rank waits before it reports members that have not joined (on CUDA
            devices, where the host does not wait for collectives: only for CPU tensors and for
            signatures).
        job: name of the torchrun or Slurm job, for the handshake of Note [Job nonce].
        nonce: name of this world that its ranks have in common already, instead of the handshake.
        address: the address on which gloo listens; None: what the host name resolves to.
            GLOO_SOCKET_IFNAME names interfaces instead.
        listener: on rank 0, file descriptor of the listening socket of "tcp://host:port".
        deterministic: whether tensors are reduced in rank order instead of by NCCL, and not host by
            host.

    Raises:
        LaunchError: the rendezvous failed: a variable is missing, a port is taken, the host does
            not answer.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: str | Store = "env://",
        *,
        device: str | torch.device = "cpu",
        timeout_s: float = 600.0,
        late_after_s: float = LATE_AFTER_S,
        job: str = "",
        nonce: str = "",
        address: str | None = None,
        listener: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.late_after_s = late_after_s
        self.deterministic = deterministic
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._gloo_devices = _gloo_devices(address)
        self._local_peers = LocalPeers()
        self._progress = SharedProgress(self._local_peers)
        if rendezvous == SCRIPT_WORLD:
            rendezvous = dist.distributed_c10d._get_default_store()
        shared_store = find_store(rendezvous, rank, size, timeout_s=timeout_s, listener=listener)
        is_private = not isinstance(rendezvous, str) or rendezvous.startswith("file:")
        if nonce or is_private:
            self._store = next_namespace(shared_store, rank, nonce)
        else:
            prefix = agree_on_namespace(shared_store, rank, size, job=job, timeout_s=timeout_s)
            self._store = PrefixStore(prefix, shared_store)
        self._presence = PresenceStore(self._store)
        self._held: dict[GroupQueue, list[GroupCall]] | None = None
        self._nccl: NcclGroups | None = None
        interval_s = min(MONITOR_INTERVAL_S, late_after_s / 8)
        self._monitor = QueueMonitor(self._presence, rank, self.device, interval_s=interval_s)
        self._queues = self._monitor.queues
        self._finalizer = weakref.finalize(self, self._monitor.close, self._progress)

    @staticmethod
    def adopt(*, device: str | torch.device = "cpu", timeout_s: float = 600.0) -> ProcessTransport:
        """The transport of the world that `torch.distributed.init_process_group` has made.

        Raises:
            LaunchError: torch.distributed is not initialised.
        """
        found = script_world()
        if found is None:
            what = "no other ranks are known: torch.distributed is not initialised"
            fix = "pass comm=weft.init(...), or call torch.distributed.init_process_group first"
            raise LaunchError(Fault("comm", what, got="None", fix=fix))
        rank, size = found
        return ProcessTransport(rank, size, SCRIPT_WORLD, device=device, timeout_s=timeout_s)

    @property
    def store(self) -> Store:
        """The store of this world, in which keys of other worlds are not seen."""
        return self._store

    def start(self, call: Call, on_late: OnLate) -> GroupCall:
        """Hand `call` to the queue of its group, or of its messages."""
        key = QueueKey.of(call)
        group_queue = self._queue(self._planned(key), call)
        if self._held is None or key.kind != "messages of group":
            return group_queue.start(call, on_late)
        group_call = group_queue.hold(call, on_late)
        self._held.setdefault(group_queue, []).append(group_call)
        return group_call

    def channel(
        self, axis: str, ranks: tuple[int, ...], *, communicator: Communicator
    ) -> GroupQueue:
        """The queue of the collectives of a group."""
        key = self._planned(QueueKey.of_group(ranks, communicator))
        return self._queue(key, _call_of(PlannedGroup(axis, ranks), self.rank))

    def _planned(self, key: QueueKey) -> QueueKey:
        """`key`, or that of the group itself where no communicator of its own was planned."""
        if key.kind == "reductions of group" and key not in self._queues:
            return QueueKey.of_group(key.ranks, "group")
        return key

    @contextmanager
    def grouped_messages(self) -> Iterator[None]:
        """Messages on devices that are started inside the block are launched together at its end."""
        self._held = {}
        try:
            yield
            # only without an error: messages of a block that failed are not launched
            held = self._held
        finally:
            self._held = None
        for group_queue, group_calls in held.items():
            group_queue.launch_held(group_calls)

    def _queue(self, key: QueueKey, call: Call) -> GroupQueue:
        group_queue = self._queues.get(key)
        if group_queue is None:
            new_queue = self._make_queue(key, call)
            group_queue = self._queues.setdefault(key, new_queue)
            self._monitor.start()
        return group_queue

    def connect_groups(self, groups: Sequence[PlannedGroup]) -> None:
        """Connect these groups for tensors on this rank's device, one after the other; every rank
        must call it with its groups of one plan. See Note [Split from the world].
        """
        nccl = self._nccl_groups()
        with nccl.planned():
            for group in groups:
                group_queue = self._queue_of(group)
                is_alone = len(group.ranks) == 1 and self.size > 1
                if is_alone or group_queue.watch.is_connected:
                    nccl.leave_out()
                else:
                    group_queue.connect(_call_of(group, self.rank), self.device.type)

    def _queue_of(self, group: PlannedGroup) -> GroupQueue:
        key = QueueKey.of_group(group.ranks, group.communicator)
        return self._queue(key, _call_of(group, self.rank))

    def _nccl_groups(self) -> NcclGroups:
        if self._nccl is None:
            process_group: Any = getattr(dist, "ProcessGroupNCCL", None)  # absent in CPU builds
            timeout = timedelta(seconds=self.timeout_s)
            self._nccl = NcclGroups(process_group, self.device, timeout)
        return self._nccl

    def claim(self, name: str) -> int:
        """The rank that first claimed `name` in this world: this one, or another."""
        key = f"claim/{name}"
        if self._store.add(key, 1) == 1:
            self._store.set(f"{key}/rank", str(self.rank))
            return self.rank
        return int(self._store.get(f"{key}/rank"))

    def report_device_calls(self, report: Callable[[Call | None], None]) -> None:
        """See `CarriesOnDevice`."""
        self._monitor.report = report

    @property
    def carriers(self) -> frozenset[str]:
        """Names of what has carried tensors of this rank."""
        return frozenset[str]().union(*(queue.carriers for queue in list(self._queues.values())))

    @property
    def failure(self) -> CommError | None:
        """Why a group of this rank was closed early; None while all are open."""
        failures = (group_queue.watch.failure for group_queue in list(self._queues.values()))
        return next((failure for failure in failures if failure is not None), None)

    def close(self, *, is_orderly: bool = False) -> None:
        """Drop all connections; calls that were not waited for are aborted, and other ranks see
        them fail.

        Without it this happens at the end of the program.

        Args:
            is_orderly: whether all ranks come here, with complete calls: then communicators of GPUs
                are ended together instead of aborted.
        """
        if is_orderly:
            for group_queue in list(self._queues.values()):
                group_queue.shut_down()
        self._finalizer()

    def _make_queue(self, key: QueueKey, call: Call) -> GroupQueue:
        name = key.name

        def connect(device_type: str, first: Call) -> DeviceGroup | SharedGroup:
            if not backend.connected:
                # before the backend connects: it could name none of the members that are missing
                self._presence.wait_for_members(name, first, timeout_s=self.timeout_s)
            made = self._connect(f"{name}/{device_type}", device_type, call)
            if isinstance(made, SharedGroup):
                return made
            policy = policy_of(device_type, deterministic=self.deterministic)
            return DeviceGroup(made, policy, _REDUCE_OPS, _scatter_options())

        if key.kind == "messages of group":
            backend = self._queue_of(PlannedGroup(call.axis, call.members)).backend
        else:
            backend = ProcessGroupBackend(connect)
        watch = GroupWatch(
            name,
            self._presence,
            timeout_s=self.timeout_s,
            late_after_s=self.late_after_s,
            announce_after_s=self._monitor.interval_s,
        )
        return GroupQueue(backend, watch)

    def _connect(
        self, prefix: str, device_type: str, call: Call
    ) -> TorchProcessGroup | SharedGroup:
        store = PrefixStore(prefix, self._store)
        size = len(call.ranks)
        if device_type == "cpu":
            shared = self._share_memory(f"{prefix}/shared", call)
            if shared is not None:
                return shared
            return self._connect_gloo(prefix, index=call.index, size=size)
        if device_type == "cuda" and dist.is_nccl_available():
            color = min(call.ranks) + 1  # torch rejects 0
            made = self._nccl_groups().connect(store, index=call.index, size=size, color=color)
            return cast(TorchProcessGroup, made)
        raise CommError(f"no backend carries tensors on {device_type!r} between processes")

    def _connect_gloo(self, prefix: str, *, index: int, size: int) -> TorchProcessGroup:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = self._gloo_devices
        options._timeout = timedelta(seconds=self.timeout_s)
        options._threads = GLOO_THREADS
        return cast(TorchProcessGroup, gloo(self._polling_store(prefix), index, size, options))

    def _polling_store(self, prefix: str) -> PollingStore:
        return PollingStore(PrefixStore(prefix, self._store), self._presence, self.timeout_s)

    def _share_memory(self, prefix: str, call: Call) -> SharedGroup | None:
        """The group of `call` in shared memory, if its members are all on this host or equally many
        on each of several; else None.
        """
        if len(call.ranks) == 1:
            return None
        meeting = self._meeting(prefix, call.ranks, call.index)
        segment = meet(meeting, self._local_peers)
        if segment is None:
            return None if self.deterministic else self._connect_hosts(prefix, meeting)
        return SharedGroup(segment, call.ranks, index=call.index, progress=self._progress)

    def _connect_hosts(self, prefix: str, meeting: Meeting) -> HostsGroup | None:
        """The group of members on several hosts; None unless each has equally many."""
        ranks, index = meeting.ranks, meeting.index
        width = members_a_host(meeting, self._local_peers)
        if not width:
            return None
        host, place = divmod(index, width)
        local_ranks = ranks[host * width : (host + 1) * width]
        local_meeting = self._meeting(f"{prefix}/host {host}", local_ranks, place)
        segment = meet(local_meeting, self._local_peers)
        if not all_share(meeting, width, is_shared=segment is not None) or segment is None:
            return None
        num_hosts = len(ranks) // width
        between = self._connect_gloo(f"{prefix}/place {place}", index=host, size=num_hosts)
        flat = self._connect_gloo(f"{prefix}/flat", index=index, size=len(ranks))
        return HostsGroup(
            segment,
            ranks,
            index=index,
            width=width,
            between=DeviceGroup(between, GLOO, _REDUCE_OPS),
            flat=DeviceGroup(flat, GLOO, _REDUCE_OPS),
            progress=self._progress,
        )

    def _meeting(self, prefix: str, ranks: tuple[int, ...], index: int) -> Meeting:
        deadline_s = time.monotonic() + self.timeout_s
        return Meeting(self._polling_store(prefix), ranks, index=index, deadline_s=deadline_s)


class QueueMonitor:
    """The queues of a transport, and a thread that watches them: it announces this rank's calls, and
    reports late ranks and the call that the device is in. `weakref.finalize` closes it with the
    transport, so it is an object of its own.

    Attributes:
        queues: the queue of each group and pair.
        report: see `CarriesOnDevice.report_device_calls`; None: nothing is reported.
        interval_s: time between two looks.
    """

    def __init__(
        self, presence: PresenceStore, rank: int, device: torch.device, *, interval_s: float
    ) -> None:
        self.queues: dict[QueueKey, GroupQueue] = {}
        self.report: Callable[[Call | None], None] | None = None
        self.interval_s = interval_s
        self._presence, self._rank, self._device = presence, rank, device
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="weft monitor", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it was."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self, progress: SharedProgress) -> None:
        """End all queues, what is under way in shared memory, and the thread."""
        # first: threads that poll the store for members end by it
        self._presence.is_closed = True
        self._closing.set()
        for (_, ranks), group_queue in self.queues.items():
            group_queue.abort(ranks.index(self._rank))
        for group_queue in self.queues.values():
            group_queue.join()
        progress.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.queues.clear()

    def _watch(self) -> None:
        if self._device.type == "cuda":  # else its questions to CUDA would open the first GPU
            torch.cuda.set_device(self._device)
        is_store_lost = False
        while not self._closing.wait(self.interval_s):
            watched = list(self.queues.values())
            self._report_device(watched)
            for group_queue in () if is_store_lost else watched:
                try:
                    group_queue.check_progress()
                except RuntimeError:
                    is_store_lost = True  # calls report what they wait for when they fail
                    break
        self._report_device(())

    def _report_device(self, queues: Sequence[GroupQueue]) -> None:
        """Report the oldest call of all groups that the device has not completed."""
        if self.report is None:
            return
        found = [call for queue in queues if (call := queue.watch.on_device.oldest()) is not None]
        oldest = min(found, key=lambda call: call.started_at_s, default=None)
        self.report(None if oldest is None else oldest.call)


def _scatter_options() -> dict[Reduce, Any]:
    """Options of NCCL's reduce-scatter, for each reduction."""
    found: dict[Reduce, Any] = {}
    for reduce, reduce_op in _REDUCE_OPS.items():
        options: Any = dist.ReduceScatterOptions()
        options.reduceOp = reduce_op
        found[reduce] = options
    return found


def _call_of(group: PlannedGroup, rank: int) -> Call:
    """A call of a group, without tensors: it names the members."""
    return Call(
        op="barrier",
        axis=group.axis,
        ranks=group.ranks,
        index=group.ranks.index(rank),
        signature="connect",
    )


def _gloo_devices(address: str | None) -> list[Any]:
    """Where gloo listens: the interfaces of GLOO_SOCKET_IFNAME, gloo's own variable, else
    `address`.
    """
    gloo: Any = dist.ProcessGroupGloo
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = [
        gloo.create_device(interface=interface) for interface in interfaces.split(",") if interface
    ]
    if devices:
        return devices
    if address is not None:
        return [gloo.create_device(hostname=address)]
    return [gloo.create_default_device()]
