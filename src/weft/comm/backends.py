"""How gloo and NCCL carry calls: their policies, their process groups by device type, and the algorithms of collectives.

Note [Calls on NCCL]
    A kernel of NCCL runs until all members have launched theirs. Two communicators whose kernels
    are launched in different orders on two ranks can wait for each other, and so can the making of
    a communicator, which synchronises the device. So on GPUs all communicators are made at start,
    in one order (`comm/group.py`), and calls are launched from the thread that computes,
    in program order, never from a worker thread. The host does not wait: `Work.wait` orders the
    caller's stream. A signature is compared by an all-reduce of its digest on the device, launched
    before the call, and read by the host in `wait`. Messages are not compared: a check in both
    directions would wait for itself.

Note [Messages on NCCL]
    Messages travel on the communicator of their axis, whose kernels run one after the other on each
    rank: a message waits for those before it. Messages in one block of `Comm.grouped_messages` are
    one kernel, in which all make progress. Programs that cannot deadlock when every message blocks
    (lowered schedules: Note [Order of transfers] in schedule/lower.py) cannot deadlock here,
    whatever consecutive messages are grouped: take the first message of the line that is not
    complete; all before it are, so both of its ranks have launched the groups that hold it.
    A receive begins when the actions before it have ended, and a lowered schedule has it directly
    before the action in whose time the tensor arrives: it occupies the device for no longer.

Note [Split from the world]
    `ncclCommSplit` makes a communicator from a larger one, without another exchange of addresses.
    All ranks of the larger one call it, each with the number (color) of its group; a rank that needs
    no group of a partition calls it too, without a color. A group that is connected later, when the
    others do not take part, is made by its members alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.in_flight import BackendCall, MessageCall, StreamCall, TorchWork
from weft.comm.transport import Call, Op, Reduce


@dataclass(frozen=True)
class BackendPolicy:
    """How calls on tensors of one device type are carried.

    Attributes:
        name: what carries them.
        native_reduce: all_reduce and reduce_scatter by the backend's own algorithm, in its order of
            summation; else every member reduces in rank order, to the same bits in every run.
        native_gather: all_gather of equal pieces by the backend's own algorithm, at any size.
        exchanges_of_two: groups of two exchange their data directly.
        is_stream_ordered: `wait` orders a stream and does not block the host.
        launches_from_caller: calls are launched by the thread that starts them, never by a worker.
        checks_on_device: signatures are compared by digests that travel with the call.
        messages_on_axis_group: messages travel on the group of their axis, several in one launch;
            else every ordered pair of ranks has a group of its own.
        connects_at_start: groups are connected before the first call, in the order of the plan.
        totals_along_axes: totals over many ranks go along the groups of axes, which exist anyway;
            else through groups of few ranks that are made for them.
        compares_in_call: signatures are compared by the call itself, without waiting in its start.
    """

    name: str
    native_reduce: bool = False
    native_gather: bool = False
    exchanges_of_two: bool = False
    is_stream_ordered: bool = False
    launches_from_caller: bool = False
    checks_on_device: bool = False
    messages_on_axis_group: bool = False
    connects_at_start: bool = False
    totals_along_axes: bool = False
    compares_in_call: bool = False


GLOO = BackendPolicy("gloo", exchanges_of_two=True)
NCCL = BackendPolicy(
    name="NCCL",
    native_reduce=True,
    native_gather=True,
    is_stream_ordered=True,
    launches_from_caller=True,
    checks_on_device=True,
    messages_on_axis_group=True,
    connects_at_start=True,
    totals_along_axes=True,
)

SHARED_MEMORY = replace(GLOO, name="shared memory", compares_in_call=True)
"""Of ranks on one host: see comm/shared_group.py."""
HOSTS = replace(SHARED_MEMORY, name="shared memory within hosts, gloo between")
"""Of ranks on several hosts, equally many on each: see comm/hosts_group.py."""

POLICIES = {"cpu": GLOO, "cuda": NCCL}


def policy_of(device_type: str, *, deterministic: bool = False) -> BackendPolicy:
    """The policy for tensors on a device type.

    Args:
        deterministic: reduce in rank order on every backend.
    """
    policy = POLICIES.get(device_type, GLOO)
    if deterministic:
        return replace(policy, native_reduce=False)
    return policy


class TorchProcessGroup(Protocol):
    """The part of ProcessGroupGloo and ProcessGroupNCCL that is used here."""

    def allreduce(self, tensors: list[Tensor], op: Any) -> TorchWork: ...
    def alltoall_base(
        self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int]
    ) -> TorchWork: ...
    def _allgather_base(self, out: Tensor, x: Tensor) -> TorchWork: ...
    def broadcast(self, x: Tensor, root: int) -> TorchWork: ...
    def gather(self, outs: list[Tensor], x: Tensor, root: int) -> TorchWork: ...
    def scatter(self, out: Tensor, xs: list[Tensor], root: int) -> TorchWork: ...
    def send(self, xs: list[Tensor], to: int, tag: int) -> TorchWork: ...
    def recv(self, xs: list[Tensor], source: int, tag: int) -> TorchWork: ...
    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: Any) -> TorchWork: ...
    def _start_coalescing(self) -> None: ...
    def _end_coalescing(self) -> TorchWork: ...
    def barrier(self) -> TorchWork: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class DeviceGroup:
    """The process group of one group of ranks for tensors on one device type, resolved once.

    Attributes:
        policy: how calls are carried.
        reduce_ops: torch.distributed's ReduceOp for each reduction.
        scatter_options: torch.distributed's ReduceScatterOptions for each reduction.
    """

    process_group: TorchProcessGroup
    policy: BackendPolicy
    reduce_ops: Mapping[Reduce, Any]
    scatter_options: Mapping[Reduce, Any] = field(default_factory=dict)

    def launch(self, call: Call) -> BackendCall:
        """Hand `call` to the process group."""
        return OPERATIONS[call.op](self, call)

    def all_to_all(
        self,
        sent: Tensor,
        received: Tensor,
        *,
        input_split_sizes: Sequence[int],
        output_split_sizes: Sequence[int],
    ) -> TorchWork:
        """All-to-all of flat buffers of any dtype; the sizes are elements for each member."""
        element_size = sent.element_size()
        sent_bytes = [element_size * numel for numel in input_split_sizes]
        received_bytes = [element_size * numel for numel in output_split_sizes]
        return self.process_group.alltoall_base(
            as_bytes(received), as_bytes(sent), received_bytes, sent_bytes
        )

    def send_to_all(self, own: Tensor, received: Tensor, size: int) -> TorchWork:
        """All-gather by one hop: `own` to every member, every member's into `received`."""
        sizes = (own.numel(),) * size
        return self.all_to_all(
            own.repeat(size), received, input_split_sizes=sizes, output_split_sizes=sizes
        )

    def exchange_with_peer(self, sent: Tensor, received: Tensor, *, index: int) -> TorchWork:
        """`sent` to the other of two members, its data into `received`."""
        return self.all_to_all(
            sent,
            received,
            input_split_sizes=_for_peer(sent, index),
            output_split_sizes=_for_peer(received, index),
        )


def _for_peer(x: Tensor, index: int) -> tuple[int, int]:
    return (x.numel(), 0) if index else (0, x.numel())


def as_bytes(buffer: Tensor) -> Tensor:
    """`buffer` as uint8, which backends move whatever the dtype."""
    return buffer.view(torch.uint8)


WATCHDOG_MARGIN = timedelta(seconds=60)
"""How much later than weft's monitor, which names the ranks that are missing, the watchdog of torch
ends a process whose call hangs.
"""


@dataclass
class NcclGroups:
    """Makes the communicators of this rank's GPU.

    Args:
        process_group: torch.distributed's ProcessGroupNCCL; None in a build without it.
        device: of this rank.
        timeout: of a call.
    """

    process_group: Any
    device: torch.device
    timeout: timedelta
    _parent: Any = field(default=None, init=False)
    _is_planned: bool = field(default=False, init=False)

    @contextmanager
    def planned(self) -> Iterator[None]:
        """Inside the block every rank connects its groups of one plan, the world first."""
        self._is_planned = True
        try:
            yield
        finally:
            self._is_planned = False
            self._parent = None

    def connect(self, store: Any, *, index: int, size: int, color: int) -> Any:
        """The process group of `size` members, of which this rank is number `index`; it blocks until
        all have come.

        Args:
            store: in which its members find each other.
            color: differs between the groups of one partition.
        """
        options = self.process_group.Options(is_high_priority_stream=True)
        options._timeout = self.timeout + WATCHDOG_MARGIN
        if self._parent is not None:
            options.split_from = self._parent
            options.split_color = color
        made = self.process_group(store, index, size, options)
        made.eager_connect_single_device(self.device)
        if self._is_planned and self._parent is None and hasattr(options, "split_from"):
            # the first one that is planned is the world: all later ones are split from it
            self._parent = made
        return made

    def leave_out(self) -> None:
        """Take part in a split of the world without a group of this rank."""
        if self._parent is not None:
            self._parent.perform_nocolor_split(self.device)


SMALL_BYTES = 1 << 18
"""Up to this many bytes of output per rank, every rank sends directly to every other: one hop
instead of a ring.
"""

MAX_TWO_RANK_ALL_REDUCE_BYTES = 1 << 22
"""Up to this size two ranks all-reduce by one exchange; beyond it gloo's own algorithm costs the
caller less.
"""

NATIVE_REDUCE_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
"""Dtypes that gloo and NCCL reduce."""

ACCUMULATED_IN_FLOAT32 = (torch.bfloat16, torch.float16)

# Note [Reductions in rank order]
# Floating-point sums depend on their order. `reduce_in_order` always adds rank 0's tensor first, then rank 1's, ..., so
# that a sum has the same bits in every run, on every member and over every transport.
#
# Note [Two ranks]
# Two ranks have no order of summation to keep: a + b equals b + a to the last bit, so both get the same bits in every
# run. Each rank sends its data once, directly to the other, and adds what it receives to its own: one hop, no copy of
# its own data. 262,144 float32 on the CPU: all_reduce 1.1 ms, gloo's own 1.8 ms.

_REDUCE_TWO: dict[Reduce, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def reduce_in_order(tensors: Sequence[Tensor], op: Reduce) -> Tensor:
    """The reduction of `tensors`, first to last, in new memory on the first one's device.

    bfloat16 and float16 are accumulated in float32 and rounded once.
    """
    first = tensors[0]
    is_16_bit = first.dtype in ACCUMULATED_IN_FLOAT32
    # a copy in any case: the first tensor may be the output of another member
    total = first.to(torch.float32 if is_16_bit else first.dtype, copy=True)
    reduce_two = _REDUCE_TWO[op]
    for tensor in tensors[1:]:
        reduce_two(total, tensor.to(total.device, total.dtype), out=total)
    if op == "avg":
        total.div_(len(tensors))
    return total.to(first.dtype)


def reduce_into(output: Tensor, tensors: Sequence[Tensor], op: Reduce) -> None:
    """The reduction of `tensors`, first to last, into memory that may be the first one's: the bits of
    `reduce_in_order`.
    """
    if output.dtype in ACCUMULATED_IN_FLOAT32:
        output.copy_(reduce_in_order(tensors, op))
        return
    reduce_two = _REDUCE_TWO[op]
    reduce_two(tensors[0], tensors[1], out=output)
    for tensor in tensors[2:]:
        reduce_two(output, tensor, out=output)
    if op == "avg":
        output.div_(len(tensors))


def backend_call(
    policy: BackendPolicy, works: Sequence[TorchWork], finish: Callable[[], object] | None = None
) -> BackendCall:
    """The handle of a collective under this policy."""
    return (StreamCall if policy.is_stream_ordered else BackendCall)(works, finish)


def all_reduce(group: DeviceGroup, call: Call) -> BackendCall:
    """In rank order where that is cheap or was asked for, else by the backend's own algorithm."""
    output = call.required_output
    size, num_bytes = len(call.ranks), output.nbytes
    policy = group.policy
    if num_bytes == 0:
        return BackendCall(())
    if output.dtype not in NATIVE_REDUCE_DTYPES:
        is_exchanged = policy.exchanges_of_two and size == 2
        return (_all_reduce_of_two if is_exchanged else _all_reduce_in_order)(group, call, output)
    if policy.native_reduce:
        return _all_reduce_native(group, call, output)
    if size == 2 and policy.exchanges_of_two and num_bytes <= MAX_TWO_RANK_ALL_REDUCE_BYTES:
        return _all_reduce_of_two(group, call, output)
    # On devices `native_reduce` is off only where rank order was asked for: then at any size.
    if size * num_bytes <= SMALL_BYTES or policy.is_stream_ordered:
        return _all_reduce_in_order(group, call, output)
    return _all_reduce_native(group, call, output)


def _all_reduce_of_two(group: DeviceGroup, call: Call, output: Tensor) -> BackendCall:
    """See Note [Two ranks]."""
    received = torch.empty_like(output)
    sizes = [output.nbytes, 0] if call.index else [0, output.nbytes]
    work = group.process_group.alltoall_base(
        received.view(torch.uint8), output.view(torch.uint8), sizes, sizes
    )
    return BackendCall((work,), partial(reduce_into, output, (output, received), call.reduce))


def _all_reduce_in_order(group: DeviceGroup, call: Call, output: Tensor) -> BackendCall:
    """Every rank receives all tensors and reduces them itself, in rank order."""
    size = len(call.ranks)
    received = output.new_empty(size * output.numel())
    work = group.send_to_all(output, received, size)
    return backend_call(
        group.policy,
        (work,),
        lambda: output.copy_(reduce_in_order(received.chunk(size), call.reduce)),
    )


def _all_reduce_native(group: DeviceGroup, call: Call, output: Tensor) -> BackendCall:
    """The all-reduce of gloo or NCCL, in place; an average is a sum that is divided."""
    work = group.process_group.allreduce([output], group.reduce_ops[summed(call.reduce)])
    return backend_call(group.policy, (work,), _division(call, output))


def summed(op: Reduce) -> Reduce:
    """The reduction by which a backend computes `op`: an average is a sum that is divided."""
    return "sum" if op == "avg" else op


def _division(call: Call, output: Tensor) -> Callable[[], object] | None:
    """What is left of an average once the sum is there."""
    return partial(output.div_, len(call.ranks)) if call.reduce == "avg" else None


def reduce_scatter(group: DeviceGroup, call: Call) -> BackendCall:
    """Each rank receives its shard of every member and reduces them in rank order; NCCL reduces
    equal pieces by its own algorithm.
    """
    output = call.required_output
    policy, size = group.policy, len(call.ranks)
    if call.required_input.numel() == 0:  # on all members or on none
        return BackendCall(())
    if size == 2 and policy.exchanges_of_two:
        return _reduce_scatter_of_two(group, call, output)
    has_equal_pieces = len(set(call.input_split_sizes)) == 1
    if output.dtype in NATIVE_REDUCE_DTYPES and has_equal_pieces and policy.native_reduce:
        return _reduce_scatter_native(group, call, output)
    received = output.new_empty(size * output.numel())
    work = group.all_to_all(
        call.required_input,
        received,
        input_split_sizes=call.input_split_sizes,
        output_split_sizes=(output.numel(),) * size,
    )

    def reduce_received() -> None:
        if output.numel() > 0:
            output.copy_(reduce_in_order(received.chunk(size), call.reduce))

    return backend_call(policy, (work,), reduce_received)


def _reduce_scatter_native(group: DeviceGroup, call: Call, output: Tensor) -> BackendCall:
    """The reduce-scatter of NCCL, of equal pieces."""
    options = group.scatter_options[summed(call.reduce)]
    work = group.process_group._reduce_scatter_base(output, call.required_input, options)
    return backend_call(group.policy, (work,), _division(call, output))


def _reduce_scatter_of_two(group: DeviceGroup, call: Call, output: Tensor) -> BackendCall:
    """See Note [Two ranks]. In place, `output` is a view of this rank's shard of the input."""
    shards = torch.split(call.required_input, list(call.input_split_sizes))
    own, peer = shards[call.index], shards[1 - call.index]
    is_in_place = own.numel() > 0 and own.data_ptr() == output.data_ptr()
    # in place the output holds this rank's own shard, which is still to be added
    received = torch.empty_like(output) if is_in_place else output
    other = received if is_in_place else own
    work = group.exchange_with_peer(peer, received, index=call.index)
    return BackendCall((work,), partial(reduce_into, output, (output, other), call.reduce))


DATA_TAG, ABORT_TAG = 0, 2

Launch = Callable[[DeviceGroup, Call], BackendCall]


def unless_empty(launch: Launch) -> Launch:
    """`launch` for calls that move bytes; for operations whose tensor is empty on all members or on
    none.
    """

    def launch_unless_empty(group: DeviceGroup, call: Call) -> BackendCall:
        tensor = call.output if call.input is None else call.input
        is_empty = tensor is not None and tensor.numel() == 0
        return BackendCall(()) if is_empty else launch(group, call)

    return launch_unless_empty


def all_gather(group: DeviceGroup, call: Call) -> BackendCall:
    """By the backend's own algorithm, by one hop, or by broadcasts: whichever is fastest."""
    own, output = call.required_input, call.required_output
    policy = group.policy
    if len(call.ranks) == 2 and policy.exchanges_of_two:
        return _all_gather_of_two(group, call)
    if policy.native_gather and len(set(call.output_split_sizes)) == 1:
        work = group.process_group._allgather_base(as_bytes(output), as_bytes(own))
        return backend_call(policy, (work,))
    if output.nbytes <= SMALL_BYTES:
        return _all_to_all_of(group, call, own.repeat(len(call.ranks)))
    return _all_gather_by_broadcasts(group, call)


def _all_gather_of_two(group: DeviceGroup, call: Call) -> BackendCall:
    """See Note [Two ranks]."""
    own = call.required_input
    slots = torch.split(call.required_output, list(call.output_split_sizes))
    _copy_unless_same(own, slots[call.index])
    work = group.exchange_with_peer(own, slots[1 - call.index], index=call.index)
    return BackendCall((work,))


def _all_gather_by_broadcasts(group: DeviceGroup, call: Call) -> BackendCall:
    """One broadcast per member; with gloo this takes a third of the time of its all-gather."""
    slots = torch.split(call.required_output, list(call.output_split_sizes))
    _copy_unless_same(call.required_input, slots[call.index])
    broadcast = group.process_group.broadcast
    works = [broadcast(as_bytes(slot), root) for root, slot in enumerate(slots) if slot.numel() > 0]
    return backend_call(group.policy, works)


def all_to_all(group: DeviceGroup, call: Call) -> BackendCall:
    """One piece to and from every member."""
    return _all_to_all_of(group, call, call.required_input)


def _all_to_all_of(group: DeviceGroup, call: Call, packed: Tensor) -> BackendCall:
    """Send the pieces of `packed`, of the input split sizes of `call`."""
    work = group.all_to_all(
        packed,
        call.required_output,
        input_split_sizes=call.input_split_sizes,
        output_split_sizes=call.output_split_sizes,
    )
    return backend_call(group.policy, (work,))


def broadcast(group: DeviceGroup, call: Call) -> BackendCall:
    """Send the root's output to the outputs of the others, in place."""
    work = group.process_group.broadcast(as_bytes(call.required_output), call.root)
    return backend_call(group.policy, (work,))


def gather(group: DeviceGroup, call: Call) -> BackendCall:
    """Every member's whole to the root."""
    wholes = _chunks_at_root(call.output, len(call.ranks))
    work = group.process_group.gather(wholes, as_bytes(call.required_input), call.root)
    return backend_call(group.policy, (work,))


def scatter(group: DeviceGroup, call: Call) -> BackendCall:
    """One whole of the root to every member."""
    wholes = _chunks_at_root(call.input, len(call.ranks))
    work = group.process_group.scatter(as_bytes(call.required_output), wholes, call.root)
    return backend_call(group.policy, (work,))


def send(group: DeviceGroup, call: Call) -> BackendCall:
    """A message in a group of its pair of ranks, whose first member sends."""
    return MessageCall((launch_send(group, call, to=1),))


def recv(group: DeviceGroup, call: Call) -> BackendCall:
    """A message in a group of its pair of ranks, whose second member receives."""
    return MessageCall((launch_recv(group, call, source=0),))


def launch_send(group: DeviceGroup, call: Call, *, to: int) -> TorchWork:
    """Send the input of `call` to a member of the process group."""
    return group.process_group.send([as_bytes(call.required_input)], to, DATA_TAG)


def launch_recv(group: DeviceGroup, call: Call, *, source: int) -> TorchWork:
    """Receive the output of `call` from a member of the process group."""
    return group.process_group.recv([as_bytes(call.required_output)], source, DATA_TAG)


def barrier(group: DeviceGroup, call: Call) -> BackendCall:
    """Complete when every member has called it."""
    return BackendCall((group.process_group.barrier(),))


def close_connections(gloo: TorchProcessGroup, index: int) -> None:
    """Close the connections of a group of gloo, which fails what is in flight: it has no such call, but
    a recv that times out does so.

    Args:
        index: place of this rank in the group.
    """
    buffer = torch.empty(1, dtype=torch.uint8)
    # under a tag of its own: no message can arrive for it, so it times out
    never_sent = gloo.recv([buffer], 1 if index == 0 else 0, ABORT_TAG)
    with suppress(RuntimeError):
        never_sent.wait(timedelta(milliseconds=1))


OPERATIONS: dict[Op, Launch] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": unless_empty(broadcast),
    "gather": unless_empty(gather),
    "scatter": unless_empty(scatter),
    "send": unless_empty(send),
    "recv": unless_empty(recv),
    "barrier": barrier,
}


def _chunks_at_root(buffer: Tensor | None, size: int) -> list[Tensor]:
    """The root's buffer of `size` wholes, as bytes; [] on the other members."""
    return [] if buffer is None else list(as_bytes(buffer).chunk(size))


def _copy_unless_same(source: Tensor, destination: Tensor) -> None:
    """Copy, unless both are the same memory: the input of an in-place collective is a part of its
    output.
    """
    if source.data_ptr() != destination.data_ptr():
        destination.copy_(source)
