"""The operations on the process groups of one group of ranks, with shorter paths for two ranks and small sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm.backend_work import BackendCall, MessageCall, StreamCall, TorchWork
from weft.comm.device_groups import DeviceGroups, TorchProcessGroup
from weft.comm.in_process import reduce_in_order, reduce_two_
from weft.comm.transport import Call, Op, Reduce

SMALL_BYTES = 1 << 18
"""Up to this many bytes of output per rank, every rank sends directly to every other: one hop
instead of a ring.
"""

MAX_TWO_RANK_ALL_REDUCE_BYTES = 1 << 22
"""Up to this size two ranks all-reduce by one exchange; beyond it gloo's own algorithm costs the
caller less.
"""

DATA_TAG = 0

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

# Note [Two ranks]
# Two ranks have no order of summation to keep: a + b equals b + a to the last bit, so both get the same bits in every
# run. Each rank sends its data once, directly to the other, and adds what it receives to its own: one hop, no copy of
# its own data. 262,144 float32 on the CPU: all_reduce 1.1 ms, gloo's own 1.8 ms.


def _all_reduce(groups: DeviceGroups, call: Call) -> BackendCall:
    output = call.required_output
    num_bytes = _num_bytes(output)
    is_native = output.dtype in NATIVE_REDUCE_DTYPES
    policy = groups.policy(output)
    if is_native and policy.native_reduce:
        return _all_reduce_native(groups, call)
    is_small_for_two = num_bytes <= MAX_TWO_RANK_ALL_REDUCE_BYTES or not is_native
    if is_small_for_two and _exchanges_of_two(groups, call, output):
        return _all_reduce_of_two(groups, call)
    total_bytes = len(call.ranks) * num_bytes
    is_exact = policy.is_stream_ordered  # there `native_reduce` was not wanted, at any size
    if total_bytes <= SMALL_BYTES or is_exact or not is_native:
        return _all_reduce_in_order(groups, call)
    return _all_reduce_native(groups, call)


def _all_reduce_of_two(groups: DeviceGroups, call: Call) -> BackendCall:
    """See Note [Two ranks]."""
    output = call.required_output
    process_group = groups.process_group(output)
    received = torch.empty_like(output)
    work = _exchange_with_peer(
        process_group,
        call,
        sent=output,
        received=received,
    )

    def add_received() -> None:
        reduce_two_(output, received, call.reduce)

    return BackendCall([work], add_received)


def _all_reduce_in_order(groups: DeviceGroups, call: Call) -> BackendCall:
    """Every rank receives all tensors and reduces them itself, in rank order."""
    output = call.required_output
    size = len(call.ranks)
    process_group = groups.process_group(output)
    received = output.new_empty(size * output.numel())
    work = send_to_all(process_group, output, received, size)

    def reduce_received() -> None:
        tensors = received.chunk(size)
        output.copy_(reduce_in_order(tensors, call.reduce))

    return _backend_call(groups, output, [work], reduce_received)


def _all_reduce_native(groups: DeviceGroups, call: Call) -> BackendCall:
    """The all-reduce of gloo or NCCL, in place."""
    output = call.required_output
    process_group = groups.process_group(output)
    if call.reduce != "avg":
        reduce_op = groups.reduce_ops[call.reduce]
        work = process_group.allreduce([output], reduce_op)
        return _backend_call(groups, output, [work])
    work = process_group.allreduce([output], groups.reduce_ops["sum"])

    def divide() -> None:
        output.div_(len(call.ranks))

    return _backend_call(groups, output, [work], divide)


def _all_gather(groups: DeviceGroups, call: Call) -> BackendCall:
    output = call.required_output
    if _exchanges_of_two(groups, call, output):
        return _all_gather_of_two(groups, call)
    has_equal_pieces = len(set(call.output_split_sizes)) == 1
    if has_equal_pieces and groups.policy(output).native_gather:
        process_group = groups.process_group(output)
        own = _as_bytes(call.required_input)
        whole = _as_bytes(output)
        work = process_group._allgather_base(whole, own)
        return _backend_call(groups, output, [work])
    if _num_bytes(output) <= SMALL_BYTES:
        own_for_each_member = call.required_input.repeat(len(call.ranks))
        return _all_to_all_of(groups, call, own_for_each_member)
    return _all_gather_by_broadcasts(groups, call)


def _all_gather_of_two(groups: DeviceGroups, call: Call) -> BackendCall:
    """See Note [Two ranks]."""
    own, output = call.required_input, call.required_output
    slots = torch.split(output, list(call.output_split_sizes))
    own_slot = slots[call.index]
    peer_slot = slots[1 - call.index]
    _copy_unless_same(own, own_slot)
    process_group = groups.process_group(output)
    work = _exchange_with_peer(
        process_group,
        call,
        sent=own,
        received=peer_slot,
    )
    return BackendCall([work])


def _all_gather_by_broadcasts(groups: DeviceGroups, call: Call) -> BackendCall:
    """One broadcast per member; with gloo this takes a third of the time of its all-gather."""
    output = call.required_output
    process_group = groups.process_group(output)
    slots = torch.split(output, list(call.output_split_sizes))
    _copy_unless_same(call.required_input, slots[call.index])
    works = []
    for root, slot in enumerate(slots):
        if slot.numel() > 0:
            piece = _as_bytes(slot)
            work = process_group.broadcast(piece, root)
            works.append(work)
    return _backend_call(groups, output, works)


def _reduce_scatter(groups: DeviceGroups, call: Call) -> BackendCall:
    """Each rank receives its shard of every member and reduces them in rank order."""
    output = call.required_output
    if _exchanges_of_two(groups, call, output):
        return _reduce_scatter_of_two(groups, call)
    is_native = output.dtype in NATIVE_REDUCE_DTYPES
    has_equal_pieces = len(set(call.input_split_sizes)) == 1
    if is_native and has_equal_pieces and groups.policy(output).native_reduce:
        return _reduce_scatter_native(groups, call)
    size = len(call.ranks)
    received = output.new_empty(size * output.numel())
    own_bytes = _num_bytes(output)
    work = _all_to_all_bytes(
        groups.process_group(output),
        sent=call.required_input,
        received=received,
        sent_numels=call.input_split_sizes,
        received_numels=(output.numel(),) * size,
    )

    def reduce_received() -> None:
        if own_bytes > 0:
            shards = received.chunk(size)
            output.copy_(reduce_in_order(shards, call.reduce))

    return _backend_call(groups, output, [work], reduce_received)


def _reduce_scatter_native(groups: DeviceGroups, call: Call) -> BackendCall:
    """The reduce-scatter of NCCL, of equal pieces."""
    output = call.required_output
    reduce: Reduce = "sum" if call.reduce == "avg" else call.reduce
    work = groups.process_group(output)._reduce_scatter_base(
        output,
        call.required_input,
        groups.scatter_options[reduce],
    )
    if call.reduce != "avg":
        return _backend_call(groups, output, [work])

    def divide() -> None:
        output.div_(len(call.ranks))

    return _backend_call(groups, output, [work], divide)


def _reduce_scatter_of_two(groups: DeviceGroups, call: Call) -> BackendCall:
    """See Note [Two ranks]. In place, `output` is a view of this rank's shard of the input."""
    output = call.required_output
    shards = torch.split(call.required_input, list(call.input_split_sizes))
    own_shard = shards[call.index]
    peer_shard = shards[1 - call.index]
    is_same_memory = own_shard.data_ptr() == output.data_ptr()
    is_in_place = is_same_memory and own_shard.numel() > 0
    if is_in_place:
        received = torch.empty_like(output)
        other = received
    else:
        received = output
        other = own_shard
    process_group = groups.process_group(output)
    work = _exchange_with_peer(
        process_group,
        call,
        sent=peer_shard,
        received=received,
    )

    def add_other() -> None:
        reduce_two_(output, other, call.reduce)

    return BackendCall([work], add_other)


def _all_to_all(groups: DeviceGroups, call: Call) -> BackendCall:
    return _all_to_all_of(groups, call, call.required_input)


def _all_to_all_of(groups: DeviceGroups, call: Call, packed: Tensor) -> BackendCall:
    """Send the pieces of `packed`, of the input split sizes of `call`."""
    output = call.required_output
    work = _all_to_all_bytes(
        groups.process_group(output),
        sent=packed,
        received=output,
        sent_numels=call.input_split_sizes,
        received_numels=call.output_split_sizes,
    )
    return _backend_call(groups, output, [work])


def _broadcast(groups: DeviceGroups, call: Call) -> BackendCall:
    output = call.required_output
    process_group = groups.process_group(output)
    work = process_group.broadcast(_as_bytes(output), call.root)
    return _backend_call(groups, output, [work])


def _gather(groups: DeviceGroups, call: Call) -> BackendCall:
    own = call.required_input
    process_group = groups.process_group(own)
    wholes = _chunks_at_root(call.output, len(call.ranks))
    sent = _as_bytes(own)
    work = process_group.gather(wholes, sent, call.root)
    return _backend_call(groups, own, [work])


def _scatter(groups: DeviceGroups, call: Call) -> BackendCall:
    output = call.required_output
    process_group = groups.process_group(output)
    wholes = _chunks_at_root(call.input, len(call.ranks))
    own = _as_bytes(output)
    work = process_group.scatter(own, wholes, call.root)
    return _backend_call(groups, output, [work])


def _send(groups: DeviceGroups, call: Call) -> BackendCall:
    """A message in a group of its pair of ranks, whose first member sends."""
    work = launch_send(groups, call, to=1)
    return MessageCall([work])


def _recv(groups: DeviceGroups, call: Call) -> BackendCall:
    work = launch_recv(groups, call, source=0)
    return MessageCall([work])


def launch_send(groups: DeviceGroups, call: Call, *, to: int) -> TorchWork:
    """Send the input of `call` to a member of the process group."""
    x = call.required_input
    return groups.process_group(x).send([_as_bytes(x)], to, DATA_TAG)


def launch_recv(groups: DeviceGroups, call: Call, *, source: int) -> TorchWork:
    """Receive the output of `call` from a member of the process group."""
    x = call.required_output
    return groups.process_group(x).recv([_as_bytes(x)], source, DATA_TAG)


def _barrier(groups: DeviceGroups, call: Call) -> BackendCall:
    return BackendCall([groups.gloo.barrier()])


Launch = Callable[[DeviceGroups, Call], BackendCall]


def _unless_empty(launch: Launch) -> Launch:
    """`launch` for calls that move bytes; for operations whose tensor is empty on all members or on
    none.
    """

    def launch_unless_empty(groups: DeviceGroups, call: Call) -> BackendCall:
        tensor = call.input
        if tensor is None:
            tensor = call.output
        if tensor is not None and tensor.numel() == 0:
            return BackendCall(())
        return launch(groups, call)

    return launch_unless_empty


OPERATIONS: dict[Op, Launch] = {
    "all_reduce": _unless_empty(_all_reduce),
    "all_gather": _all_gather,
    "reduce_scatter": _unless_empty(_reduce_scatter),
    "all_to_all": _all_to_all,
    "broadcast": _unless_empty(_broadcast),
    "gather": _unless_empty(_gather),
    "scatter": _unless_empty(_scatter),
    "send": _unless_empty(_send),
    "recv": _unless_empty(_recv),
    "barrier": _barrier,
}


def _backend_call(
    groups: DeviceGroups,
    x: Tensor,
    works: Sequence[TorchWork],
    finish: Callable[[], object] | None = None,
) -> BackendCall:
    """The handle of collectives on tensors like `x`."""
    policy = groups.policy(x)
    if policy.is_stream_ordered:
        return StreamCall(works, finish)
    return BackendCall(works, finish)


def _chunks_at_root(buffer: Tensor | None, size: int) -> list[Tensor]:
    """The root's buffer of `size` wholes, as bytes; [] on the other members."""
    if buffer is None:
        return []
    return list(_as_bytes(buffer).chunk(size))


def send_to_all(
    process_group: TorchProcessGroup,
    own: Tensor,
    received: Tensor,
    size: int,
) -> TorchWork:
    """All-gather by one hop: `own` to every member, every member's into `received`."""
    numels = (own.numel(),) * size
    return _all_to_all_bytes(
        process_group,
        sent=own.repeat(size),
        received=received,
        sent_numels=numels,
        received_numels=numels,
    )


def _exchange_with_peer(
    process_group: TorchProcessGroup,
    call: Call,
    *,
    sent: Tensor,
    received: Tensor,
) -> TorchWork:
    """`sent` to the other of two members, its data into `received`."""
    peer = 1 - call.index
    sent_numels = [0, 0]
    received_numels = [0, 0]
    sent_numels[peer] = sent.numel()
    received_numels[peer] = received.numel()
    return _all_to_all_bytes(
        process_group,
        sent=sent,
        received=received,
        sent_numels=sent_numels,
        received_numels=received_numels,
    )


def _all_to_all_bytes(
    process_group: TorchProcessGroup,
    *,
    sent: Tensor,
    received: Tensor,
    sent_numels: Sequence[int],
    received_numels: Sequence[int],
) -> TorchWork:
    """All-to-all of flat buffers of any dtype; the numbers are elements per member."""
    element_size = sent.element_size()
    sent_bytes = [element_size * numel for numel in sent_numels]
    received_bytes = [element_size * numel for numel in received_numels]
    return process_group.alltoall_base(
        _as_bytes(received),
        _as_bytes(sent),
        received_bytes,
        sent_bytes,
    )


def _exchanges_of_two(groups: DeviceGroups, call: Call, x: Tensor) -> bool:
    """Whether the path of Note [Two ranks] applies."""
    return len(call.ranks) == 2 and groups.policy(x).exchanges_of_two


def _copy_unless_same(source: Tensor, destination: Tensor) -> None:
    """Copy, unless both are the same memory: the input of an in-place collective is a part of its
    output.
    """
    if source.data_ptr() != destination.data_ptr():
        destination.copy_(source)


def _as_bytes(buffer: Tensor) -> Tensor:
    """`buffer` as uint8, which backends move whatever the dtype."""
    return buffer.view(torch.uint8)


def _num_bytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()
