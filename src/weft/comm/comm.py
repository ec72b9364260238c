"""`Comm`: every operation between ranks, addressed by mesh-axis name. One object per rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.comm import collectives, compiled_calls
from weft.comm.backends import policy_of
from weft.comm.collectives import LoweredOp
from weft.comm.group import Group, axis_group, world_stages
from weft.comm.observe import (
    CallMonitor,
    CallProfiler,
    LateRanks,
    ObservedCall,
    Observer,
    WaitClock,
    failure_note,
    late_ranks,
    operation,
    print_late_ranks,
)
from weft.comm.transport import (
    Call,
    CarriesOnDevice,
    Channel,
    Communicator,
    GroupsMessages,
    PendingCall,
    Reduce,
    ReportsFailure,
    SharesProcess,
    Transport,
    Work,
)
from weft.core.axes import world_partition
from weft.core.mesh import Axis, Mesh, axis_names
from weft.errors import CommError, counted

T = TypeVar("T")


class Comm:
    """Collectives and messages of one rank: `comm.all_reduce(x, "tp")`, `comm.all_gather(x, ("dp",
    "cp"), dim=1)`.

    An axis is the name of a mesh axis, or a tuple of names taken together as one group in mesh
    order. An axis of degree 1 returns at once: no transport, nothing counted. Functional operations
    return new memory, those that end in `_` work in place and return their argument. Every
    operation has a `start_` variant that returns a `Work`; its tensors must not be read or written
    until that has been waited for. Autograd does not record these operations: `comm/ops.py` has
    differentiable ones.

    Args:
        observers: see every operation that goes to the transport.
        monitor: sees which call this rank waits for.
        on_late: called when a group's members have not joined a call after some seconds (10 for
            `ProcessTransport`), once per call and from any thread, while the call goes on waiting.
            It prints a note on stderr by default.

    Attributes:
        checked: whether members first compare their signatures, if that costs messages (processes).
            True at first; it may be switched, on every rank at the same point.
        wait_clock: measures the time in which this rank waits for calls; None: it is not measured.
        recorder: sees when each call is started and waited for; None: nothing is recorded.
        handle: what compiled code knows this object by.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        transport: Transport,
        *,
        observers: tuple[Observer, ...] = (),
        monitor: CallMonitor | None = None,
        on_late: Callable[[LateRanks], None] = print_late_ranks,
    ) -> None:
        if rank != transport.rank or mesh.size != transport.size:
            here = f"rank {rank} of mesh {mesh} ({counted(mesh.size, 'rank')})"
            there = f"rank {transport.rank} of {transport.size}"
            raise CommError(f"{here} was given the transport of {there}")
        self.mesh = mesh
        self.rank = rank
        self.transport = transport
        self.observers = observers
        self.monitor = monitor
        self.on_late = on_late
        self.device = transport.device
        self.checked = True
        self.wait_clock: WaitClock | None = None
        self.recorder: CallProfiler | None = None
        self.handle = compiled_calls.handle_of(self)
        self._groups: dict[tuple[Axis, bool, Communicator], Group] = {}
        self._has_device_calls = policy_of(self.device.type).is_stream_ordered
        if monitor is not None and isinstance(transport, CarriesOnDevice):
            transport.report_device_calls(monitor.on_device)

    def degree(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return self._group(axis).degree

    def index(self, axis: Axis) -> int:
        """This rank's place along `axis`."""
        return self._group(axis).index

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        """The same: a copy of a layer communicates with the same ranks."""
        return self

    def group(self, axis: Axis) -> tuple[int, ...]:
        """World ranks along `axis`, in mesh order."""
        return self._group(axis).ranks

    def share_in_process(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The result of `compute()`, computed once for each key by ranks that are threads of one
        process. It depends on nothing but the key, and is not to be changed.
        """
        if isinstance(self.transport, SharesProcess):
            return self.transport.shared_results.get(key, compute)
        return compute()

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Signatures are not compared inside the block; every rank must enter it at the same point."""
        before = self.checked
        self.checked = False
        try:
            yield
        finally:
            self.checked = before

    def check_connections(self) -> None:
        """Raise the failure of a call on a device that the host did not wait for.

        Call it after the host has waited for a device and before it uses what it read: an aborted
        call leaves anything in its tensors.

        Raises:
            CommError: a call was aborted.
        """
        if isinstance(self.transport, ReportsFailure) and self.transport.failure is not None:
            raise self.transport.failure

    def all_reduce(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Tensor:
        """The reduction of every member's x, in new memory."""
        if torch.compiler.is_dynamo_compiling():
            return compiled_calls.all_reduce(x, self.handle, self._group(axis), op)
        return self.start_all_reduce(x, axis, op=op).wait()

    def start_all_reduce(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._start(collectives.all_reduce(x, self._group(axis), op))

    def all_reduce_(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Tensor:
        """The reduction of every member's x, written into x."""
        return self.start_all_reduce_(x, axis, op=op).wait()

    def start_all_reduce_(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._start(collectives.all_reduce_(x, self._group(axis), op))

    def all_gather(
        self, x: Tensor, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Every member's x, concatenated along `dim`; `sizes` are the members' lengths along `dim`
        if they differ.
        """
        if torch.compiler.is_dynamo_compiling():
            return compiled_calls.all_gather(x, self.handle, self._group(axis), dim, sizes)
        return self.start_all_gather(x, axis, dim=dim, sizes=sizes).wait()

    def start_all_gather(
        self, x: Tensor, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Work:
        return self._start(collectives.all_gather(x, self._group(axis), dim, sizes))

    def all_gather_(self, buffer: Tensor, axis: Axis) -> Tensor:
        """`buffer` is flat, one equal shard per member: every other member's shard is written into
        it.
        """
        return self.start_all_gather_(buffer, axis).wait()

    def start_all_gather_(self, buffer: Tensor, axis: Axis) -> Work:
        return self._start(collectives.all_gather_(buffer, self._group(axis)))

    def reduce_scatter(
        self,
        x: Tensor,
        axis: Axis,
        *,
        dim: int = 0,
        op: Reduce = "sum",
        sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """This member's piece along `dim` of the reduction of every member's x; `sizes` are the
        pieces' lengths.
        """
        if torch.compiler.is_dynamo_compiling():
            group = self._group(axis)
            return compiled_calls.reduce_scatter(x, self.handle, group, dim, op, sizes)
        return self.start_reduce_scatter(x, axis, dim=dim, op=op, sizes=sizes).wait()

    def start_reduce_scatter(
        self,
        x: Tensor,
        axis: Axis,
        *,
        dim: int = 0,
        op: Reduce = "sum",
        sizes: Sequence[int] | None = None,
        communicator: Communicator = "group",
    ) -> Work:
        group = self._group(axis, communicator)
        return self._start(collectives.reduce_scatter(x, group, dim, op, sizes))

    def reduce_scatter_(self, buffer: Tensor, axis: Axis, *, op: Reduce = "sum") -> Tensor:
        """`buffer` is flat, one equal shard per member: the reduction of all buffers is written
        into this member's shard.

        Returns that shard, a view; the other shards do not change.
        """
        return self.start_reduce_scatter_(buffer, axis, op=op).wait()

    def start_reduce_scatter_(self, buffer: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._start(collectives.reduce_scatter_(buffer, self._group(axis), op))

    def all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Piece j of x along dim 0 goes to member j; returns the received pieces in group order.
        Equal pieces by default.
        """
        if torch.compiler.is_dynamo_compiling():
            group = self._group(axis)
            return compiled_calls.all_to_all(x, self.handle, group, send_sizes, recv_sizes)
        return self.start_all_to_all(x, axis, send_sizes=send_sizes, recv_sizes=recv_sizes).wait()

    def start_all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
    ) -> Work:
        return self._start(collectives.all_to_all(x, self._group(axis), send_sizes, recv_sizes))

    def broadcast_(self, x: Tensor, axis: Axis, *, root: int = 0) -> Tensor:
        """x of member `root` (a place along the axis), written into every member's x."""
        return self.start_broadcast_(x, axis, root=root).wait()

    def start_broadcast_(self, x: Tensor, axis: Axis, *, root: int = 0) -> Work:
        return self._start(collectives.broadcast_(x, self._group(axis), root))

    def gather(self, x: Tensor, axis: Axis, *, root: int = 0) -> tuple[Tensor, ...] | None:
        """Every member's x, in group order, at member `root`; None elsewhere."""
        return self.start_gather(x, axis, root=root).wait()

    def start_gather(
        self, x: Tensor, axis: Axis, *, root: int = 0
    ) -> Work[tuple[Tensor, ...] | None]:
        return self._start(collectives.gather(x, self._group(axis), root))

    def scatter(
        self, pieces: Sequence[Tensor] | None, out: Tensor, axis: Axis, *, root: int = 0
    ) -> Tensor:
        """Piece i of member `root`'s `pieces` (None elsewhere), written into member i's `out`."""
        return self.start_scatter(pieces, out, axis, root=root).wait()

    def start_scatter(
        self, pieces: Sequence[Tensor] | None, out: Tensor, axis: Axis, *, root: int = 0
    ) -> Work:
        return self._start(collectives.scatter(pieces, out, self._group(axis), root))

    def send(self, x: Tensor, axis: Axis, *, to: int) -> None:
        """x to member `to` (a place along the axis); returns when it was received."""
        self.start_send(x, axis, to=to).wait()

    def start_send(self, x: Tensor, axis: Axis, *, to: int) -> Work:
        return self._start(collectives.send(x, self._group(axis), to))

    def recv(self, out: Tensor, axis: Axis, *, source: int) -> Tensor:
        """What member `source` sends, written into `out`."""
        return self.start_recv(out, axis, source=source).wait()

    def start_recv(self, out: Tensor, axis: Axis, *, source: int) -> Work:
        return self._start(collectives.recv(out, self._group(axis), source))

    def grouped_messages(self) -> AbstractContextManager[None]:
        """Messages that are started inside the block belong together: none of them waits for another.

        On GPUs they are launched together at its end, and must not be waited for before; messages
        of one axis that are started one after the other begin one after the other there. So a
        rank that sends and receives at once must do both in one block. See Note [Calls on NCCL].
        """
        if isinstance(self.transport, GroupsMessages):
            return self.transport.grouped_messages()
        return nullcontext()

    def barrier(self, axis: Axis) -> None:
        """Return when every member has called this."""
        self.start_barrier(axis).wait()

    def start_barrier(self, axis: Axis) -> Work[None]:
        return self._start(collectives.barrier(self._group(axis)))

    def all_gather_world(self, rows: Tensor) -> Tensor:
        """The rows of all ranks of the mesh, concatenated along dim 0 in rank order.

        For small tensors: it goes through several groups, see Note [World stages].
        """
        for group in self._world_groups(self.device.type):
            rows = self._start(collectives.all_gather(rows, group, 0, None)).wait()
        return rows

    def combine_world(self, row: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """One row for all ranks of the mesh from one row of each; the same bits on every rank.

        For small tensors: it goes through several groups, see Note [World stages].

        Args:
            row: of this rank, one dimension.
            combine: from rows [n, columns] to one row; associative, as it is called once a stage.
        """
        for group in self._world_groups(self.device.type):
            gathered = collectives.all_gather(row.unsqueeze(0), group, 0, None)
            row = combine(self._start(gathered).wait())
        return row

    def sum_world(self, row: Tensor) -> Tensor:
        """The sum of the rows of all ranks of the mesh; see `combine_world`."""
        return self.combine_world(row, lambda rows: rows.sum(0))

    def barrier_world(self) -> None:
        """Return when every rank of the mesh has called it."""
        for group in self._world_groups("cpu"):
            self._start(collectives.barrier(group)).wait()

    def _world_groups(self, device_type: str) -> tuple[Group, ...]:
        """The groups through which a small collective of tensors on a device type reaches all ranks,
        innermost first.
        """
        stages = world_stages(
            self.rank, self.mesh.size, checked=self.checked, transport=self.transport
        )
        if len(stages) <= 1 or not policy_of(device_type).totals_along_axes:
            return stages
        return tuple(map(self._group, world_partition(self.mesh)))

    def _group(self, axis: Axis, communicator: Communicator = "group") -> Group:
        # calls carry what the group says: one that is cached must not say what held before a switch
        key = (axis, self.checked, communicator)
        group = self._groups.get(key)
        if group is None:
            group = axis_group(
                self.mesh,
                self.rank,
                axis,
                checked=self.checked,
                communicator=communicator,
                transport=self.transport,
            )
            self._groups[key] = group
        return group

    def _start(self, lowered: LoweredOp[T]) -> Work[T]:
        """Start an operation: of a group on its channel, a message on the transport."""
        group, call, finish = lowered.group, lowered.call, lowered.finish
        if call is None:
            return Work.done(finish())
        channel = self.transport if group is None else group.channel

        def note() -> str:
            return failure_note(call, self.mesh, self.rank)

        if not self.observers:
            return Work(self._start_call(call, channel), finish, note)
        record = operation(call)
        for observer in self.observers:
            observer.started(record)
        pending = self._start_call(call, channel)

        def observed_finish() -> T:
            for observer in self.observers:
                observer.finished(record)
            return finish()

        return Work(pending, observed_finish, note)

    def _start_call(self, call: Call, channel: Channel) -> PendingCall | None:
        """Hand a call to the transport, once the monitor and the recorder have seen it."""
        monitor, recorder, clock = self.monitor, self.recorder, self.wait_clock
        begin = None if recorder is None else recorder.begin_call(call)
        position = 0 if monitor is None else monitor.started(call)
        if monitor is not None and self._has_device_calls:
            call = replace(call, count=position)
        pending = channel.start(call, self._report_late)
        # after the start, with the time before it: what the backend takes to launch is part of the call
        record = None if recorder is None else recorder.call_started(call, begin)
        is_observed = monitor is not None or recorder is not None or clock is not None
        if pending is None or not is_observed:
            return pending
        return ObservedCall(pending, call, position, record, monitor, recorder, clock)

    def _report_late(self, call: Call, missing: tuple[int, ...], waited_s: float) -> None:
        self.on_late(late_ranks(call, missing, waited_s, mesh=self.mesh, rank=self.rank))


def comm_or_world(comm: Comm | None, *, axis: Axis, device: torch.device) -> Comm:
    """`comm`, or if it is None the world that the script initialised torch.distributed with, all of
    it along `axis`.

    Every call with None opens connections of its own; every rank must make the same calls in the
    same order.

    Raises:
        LaunchError: `comm` is None, and torch.distributed has not been initialised.
    """
    if comm is not None:
        return comm
    from weft.comm.group import planned_groups  # late: a comm has its own transport
    from weft.comm.process_groups import ProcessTransport

    transport = ProcessTransport.adopt(device=device)
    first_axis = axis_names(axis)[0]
    mesh = Mesh.parse(f"{first_axis}{transport.size}")
    if policy_of(device.type).connects_at_start:
        transport.connect_groups(planned_groups(mesh, transport.rank))
    return Comm(mesh, transport.rank, transport)


def script_comm(axis: Axis) -> Comm:
    """Over the world that the script initialised torch.distributed with, all of it along `axis`, for
    tensors on the CPU; without one, of this process alone.
    """
    from weft.comm.process_groups import script_world  # late, as above

    if script_world() is None:
        from weft.comm.threads import ThreadWorld  # late: most scripts have processes

        return Comm(Mesh.parse(""), 0, ThreadWorld(1).transport(0))
    return comm_or_world(None, axis=axis, device=torch.device("cpu"))
