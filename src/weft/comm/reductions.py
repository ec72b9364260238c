"""Reductions in rank order, and the algorithms of all_reduce and reduce_scatter on a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm.backend_work import BackendCall, backend_call
from weft.comm.device_groups import DeviceGroup
from weft.comm.transport import Call, Reduce

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

_ACCUMULATE: dict[Reduce, Callable[[Tensor, Tensor], object]] = {
    "sum": Tensor.add_,
    "avg": Tensor.add_,
    "max": lambda total, x: torch.maximum(total, x, out=total),
    "min": lambda total, x: torch.minimum(total, x, out=total),
    "product": Tensor.mul_,
}


def reduce_in_order(tensors: Sequence[Tensor], op: Reduce) -> Tensor:
    """The reduction of `tensors`, first to last, in new memory on the first one's device.

    bfloat16 and float16 are accumulated in float32 and rounded once.
    """
    first = tensors[0]
    is_16_bit = first.dtype in ACCUMULATED_IN_FLOAT32
    total = first.to(torch.float32 if is_16_bit else first.dtype, copy=True)
    accumulate = _ACCUMULATE[op]
    for tensor in tensors[1:]:
        accumulate(total, tensor.to(total.device, total.dtype))
    if op == "avg":
        total.div_(len(tensors))
    return total.to(first.dtype)


def reduce_two_(total: Tensor, other: Tensor, op: Reduce) -> None:
    """The reduction of two tensors, written into the first; the bits are those of `reduce_in_order`
    in either order.
    """
    if total.dtype in ACCUMULATED_IN_FLOAT32:
        total.copy_(reduce_in_order((total, other), op))
        return
    _ACCUMULATE[op](total, other)
    if op == "avg":
        total.div_(2)


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
    return BackendCall((work,), lambda: reduce_two_(output, received, call.reduce))


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
    is_average = call.reduce == "avg"
    reduce_op = group.reduce_ops["sum" if is_average else call.reduce]
    work = group.process_group.allreduce([output], reduce_op)
    divide = (lambda: output.div_(len(call.ranks))) if is_average else None
    return backend_call(group.policy, (work,), divide)


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
    is_average = call.reduce == "avg"
    options = group.scatter_options["sum" if is_average else call.reduce]
    work = group.process_group._reduce_scatter_base(output, call.required_input, options)
    divide = (lambda: output.div_(len(call.ranks))) if is_average else None
    return backend_call(group.policy, (work,), divide)


def _reduce_scatter_of_two(group: DeviceGroup, call: Call, output: Tensor) -> BackendCall:
    """See Note [Two ranks]. In place, `output` is a view of this rank's shard of the input."""
    shards = torch.split(call.required_input, list(call.input_split_sizes))
    own, peer = shards[call.index], shards[1 - call.index]
    is_in_place = own.numel() > 0 and own.data_ptr() == output.data_ptr()
    received = torch.empty_like(output) if is_in_place else output
    other = received if is_in_place else own
    work = group.exchange_with_peer(peer, received, index=call.index)
    return BackendCall((work,), lambda: reduce_two_(output, other, call.reduce))
