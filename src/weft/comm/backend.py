"""Flat calls on torch.distributed backends: one function per operation, with shorter paths for two ranks and small sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.backend_policy import BackendPolicy, policy_of
from weft.comm.backend_work import (
    BackendCall,
    CheckedStreamCall,
    MessageCall,
    StreamCall,
    TorchWork,
)
from weft.comm.in_process import reduce_in_order, reduce_two_
from weft.comm.signature import (
    check_signatures,
    decode_signature,
    digests_agree,
    encode_signature,
    signature_digest,
)
from weft.comm.transport import Call, Op, Reduce

SMALL_BYTES = 1 << 18
"""Up to this many bytes of output per rank, every rank sends directly to every other: one hop
instead of a ring.
"""

MAX_TWO_RANK_ALL_REDUCE_BYTES = 1 << 22
"""Up to this size two ranks all-reduce by one exchange; beyond it gloo's own algorithm costs the
caller less.
"""

MAX_RANKS_COMPARED_BY_TEXT = 8
"""In larger groups, members compare digests of their signatures first."""
EXCHANGE_TIMEOUT_S = 60.0

DATA_TAG, SIGNATURE_TAG, ABORT_TAG = 0, 1, 2

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


class TorchProcessGroup(Protocol):
    """The part of ProcessGroupGloo and ProcessGroupNCCL that is used here."""

    def allreduce(self, tensors: list[Tensor], op: Any) -> TorchWork: ...
    def alltoall_base(
        self,
        out: Tensor,
        x: Tensor,
        out_sizes: list[int],
        sizes: list[int],
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


class ProcessGroupBackend:
    """The process groups of one group of ranks, one for each device type; each is connected when
    its first tensor comes, or by `process_group_for`.

    Args:
        connect: makes the process group for a device type, `connect("cpu")`; it may block until all
            members call it.
        reduce_ops: torch.distributed's ReduceOp for each reduction.
        scatter_options: torch.distributed's ReduceScatterOptions for each reduction.
        deterministic: whether reductions are in rank order on every backend.
    """

    def __init__(
        self,
        connect: Callable[[str], TorchProcessGroup],
        reduce_ops: Mapping[Reduce, Any],
        *,
        scatter_options: Mapping[Reduce, Any] | None = None,
        deterministic: bool = False,
    ) -> None:
        self.reduce_ops = reduce_ops
        self.scatter_options = scatter_options or {}
        self.deterministic = deterministic
        self._connect = connect
        self._process_groups: dict[str, TorchProcessGroup] = {}

    @property
    def gloo(self) -> TorchProcessGroup:
        """The process group for tensors on the CPU."""
        return self.process_group_for("cpu")

    def process_group(self, x: Tensor) -> TorchProcessGroup:
        """The process group for tensors on the device of `x`."""
        return self.process_group_for(x.device.type)

    def process_group_for(self, device_type: str) -> TorchProcessGroup:
        """The process group for a device type."""
        if device_type not in self._process_groups:
            self._process_groups[device_type] = self._connect(device_type)
        return self._process_groups[device_type]

    def policy(self, x: Tensor) -> BackendPolicy:
        """How tensors on the device of `x` are carried."""
        return policy_of(x.device.type, deterministic=self.deterministic)

    def launch(self, call: Call) -> BackendCall:
        """Hand `call` to the process group of its tensors."""
        return _DISPATCH[call.op](self, call)

    def launch_checked(self, call: Call, device: torch.device) -> BackendCall:
        """Hand `call` to the process group of its tensors, after a digest of its signature; waiting
        raises MismatchError. Messages are not compared: see Note [Calls on NCCL].
        """
        if call.is_p2p:
            return self.launch(call)
        own = signature_digest(call)
        total = own.to(device)
        process_group = self.process_group_for(device.type)
        checking = process_group.allreduce([total], self.reduce_ops["sum"])
        launched = self.launch(call)

        def compare() -> None:
            if not digests_agree(own, total.cpu(), len(call.ranks)):
                texts = self._exchange_texts(call)  # every member sees the same total, so all do
                texts.wait(EXCHANGE_TIMEOUT_S)

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
        work = self.gloo.allreduce([total], self.reduce_ops["sum"])

        def compare() -> None:
            if not digests_agree(own, total, len(call.ranks)):
                texts = self._exchange_texts(call)  # every member sees the same total, so all do
                texts.wait(EXCHANGE_TIMEOUT_S)

        return BackendCall([work], compare)

    def _exchange_texts(self, call: Call) -> BackendCall:
        size = len(call.ranks)
        own = encode_signature(call)
        received = own.new_empty(size, own.numel())

        def compare() -> None:
            signatures = [decode_signature(row, size) for row in received]
            check_signatures(call.axis, call.ranks, signatures)

        if not call.is_p2p:
            work = _send_to_all(self.gloo, own, received.view(-1), size)
            return BackendCall([work], compare)
        peer = 1 - call.index
        received[call.index].copy_(own)
        recv = self.gloo.recv([received[peer]], peer, SIGNATURE_TAG)
        send = self.gloo.send([own], peer, SIGNATURE_TAG)
        return MessageCall([recv, send], compare)

    def abort(self, index: int) -> None:
        """Fail what is in flight; gloo has no such call, but a recv that times out closes all
        connections.
        """
        for device_type, process_group in self._process_groups.items():
            if device_type != "cpu":
                process_group.abort()
        if "cpu" not in self._process_groups:
            return
        peer = 1 if index == 0 else 0
        buffer = torch.empty(1, dtype=torch.uint8)
        never_sent = self.gloo.recv([buffer], peer, ABORT_TAG)
        with contextlib.suppress(RuntimeError):
            never_sent.wait(timedelta(milliseconds=1))


def _all_reduce(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    output = call.required_output
    num_bytes = _num_bytes(output)
    is_native = output.dtype in NATIVE_REDUCE_DTYPES
    policy = backend.policy(output)
    if is_native and policy.native_reduce:
        return _all_reduce_native(backend, call)
    is_small_for_two = num_bytes <= MAX_TWO_RANK_ALL_REDUCE_BYTES or not is_native
    if is_small_for_two and _exchanges_of_two(backend, call, output):
        return _all_reduce_of_two(backend, call)
    total_bytes = len(call.ranks) * num_bytes
    is_exact = policy.is_stream_ordered  # there `native_reduce` was not wanted, at any size
    if total_bytes <= SMALL_BYTES or is_exact or not is_native:
        return _all_reduce_in_order(backend, call)
    return _all_reduce_native(backend, call)


def _all_reduce_of_two(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """See Note [Two ranks]."""
    output = call.required_output
    process_group = backend.process_group(output)
    received = torch.empty_like(output)
    work = _exchange_with_peer(process_group, call, sent=output, received=received)

    def add_received() -> None:
        reduce_two_(output, received, call.reduce)

    return BackendCall([work], add_received)


def _all_reduce_in_order(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """Every rank receives all tensors and reduces them itself, in rank order."""
    output = call.required_output
    size = len(call.ranks)
    process_group = backend.process_group(output)
    received = output.new_empty(size * output.numel())
    work = _send_to_all(process_group, output, received, size)

    def reduce_received() -> None:
        tensors = received.chunk(size)
        output.copy_(reduce_in_order(tensors, call.reduce))

    return _backend_call(backend, output, [work], reduce_received)


def _all_reduce_native(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """The all-reduce of gloo or NCCL, in place."""
    output = call.required_output
    process_group = backend.process_group(output)
    if call.reduce != "avg":
        reduce_op = backend.reduce_ops[call.reduce]
        work = process_group.allreduce([output], reduce_op)
        return _backend_call(backend, output, [work])
    work = process_group.allreduce([output], backend.reduce_ops["sum"])

    def divide() -> None:
        output.div_(len(call.ranks))

    return _backend_call(backend, output, [work], divide)


def _all_gather(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    output = call.required_output
    if _exchanges_of_two(backend, call, output):
        return _all_gather_of_two(backend, call)
    has_equal_pieces = len(set(call.output_split_sizes)) == 1
    if has_equal_pieces and backend.policy(output).native_gather:
        process_group = backend.process_group(output)
        own = _as_bytes(call.required_input)
        return _backend_call(
            backend, output, [process_group._allgather_base(_as_bytes(output), own)]
        )
    if _num_bytes(output) <= SMALL_BYTES:
        own_for_each_member = call.required_input.repeat(len(call.ranks))
        return _all_to_all_of(backend, call, own_for_each_member)
    return _all_gather_by_broadcasts(backend, call)


def _all_gather_of_two(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """See Note [Two ranks]."""
    own, output = call.required_input, call.required_output
    slots = torch.split(output, list(call.output_split_sizes))
    own_slot = slots[call.index]
    peer_slot = slots[1 - call.index]
    _copy_unless_same(own, own_slot)
    process_group = backend.process_group(output)
    work = _exchange_with_peer(process_group, call, sent=own, received=peer_slot)
    return BackendCall([work])


def _all_gather_by_broadcasts(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """One broadcast per member; with gloo this takes a third of the time of its all-gather."""
    output = call.required_output
    process_group = backend.process_group(output)
    slots = torch.split(output, list(call.output_split_sizes))
    _copy_unless_same(call.required_input, slots[call.index])
    works = []
    for root, slot in enumerate(slots):
        if slot.numel() > 0:
            works.append(process_group.broadcast(_as_bytes(slot), root))
    return _backend_call(backend, output, works)


def _reduce_scatter(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """Each rank receives its shard of every member and reduces them in rank order."""
    output = call.required_output
    if _exchanges_of_two(backend, call, output):
        return _reduce_scatter_of_two(backend, call)
    is_native = output.dtype in NATIVE_REDUCE_DTYPES
    has_equal_pieces = len(set(call.input_split_sizes)) == 1
    if is_native and has_equal_pieces and backend.policy(output).native_reduce:
        return _reduce_scatter_native(backend, call)
    size = len(call.ranks)
    received = output.new_empty(size * output.numel())
    own_bytes = _num_bytes(output)
    work = _all_to_all_bytes(
        backend.process_group(output),
        sent=call.required_input,
        received=received,
        sent_numels=call.input_split_sizes,
        received_numels=(output.numel(),) * size,
    )

    def reduce_received() -> None:
        if own_bytes > 0:
            shards = received.chunk(size)
            output.copy_(reduce_in_order(shards, call.reduce))

    return _backend_call(backend, output, [work], reduce_received)


def _reduce_scatter_native(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    """The reduce-scatter of NCCL, of equal pieces."""
    output = call.required_output
    reduce: Reduce = "sum" if call.reduce == "avg" else call.reduce
    work = backend.process_group(output)._reduce_scatter_base(
        output,
        call.required_input,
        backend.scatter_options[reduce],
    )
    if call.reduce != "avg":
        return _backend_call(backend, output, [work])

    def divide() -> None:
        output.div_(len(call.ranks))

    return _backend_call(backend, output, [work], divide)


def _reduce_scatter_of_two(backend: ProcessGroupBackend, call: Call) -> BackendCall:
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
    process_group = backend.process_group(output)
    work = _exchange_with_peer(process_group, call, sent=peer_shard, received=received)

    def add_other() -> None:
        reduce_two_(output, other, call.reduce)

    return BackendCall([work], add_other)


def _all_to_all(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    return _all_to_all_of(backend, call, call.required_input)


def _all_to_all_of(backend: ProcessGroupBackend, call: Call, packed: Tensor) -> BackendCall:
    """Send the pieces of `packed`, of the input split sizes of `call`."""
    output = call.required_output
    work = _all_to_all_bytes(
        backend.process_group(output),
        sent=packed,
        received=output,
        sent_numels=call.input_split_sizes,
        received_numels=call.output_split_sizes,
    )
    return _backend_call(backend, output, [work])


def _broadcast(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    output = call.required_output
    process_group = backend.process_group(output)
    work = process_group.broadcast(_as_bytes(output), call.root)
    return _backend_call(backend, output, [work])


def _gather(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    own = call.required_input
    process_group = backend.process_group(own)
    wholes = _chunks_at_root(call.output, len(call.ranks))
    work = process_group.gather(wholes, _as_bytes(own), call.root)
    return _backend_call(backend, own, [work])


def _scatter(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    output = call.required_output
    process_group = backend.process_group(output)
    wholes = _chunks_at_root(call.input, len(call.ranks))
    work = process_group.scatter(_as_bytes(output), wholes, call.root)
    return _backend_call(backend, output, [work])


def _send(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    x = call.required_input
    process_group = backend.process_group(x)
    return _launch_message(
        backend,
        x,
        lambda: process_group.send([_as_bytes(x)], 1, DATA_TAG),
    )


def _recv(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    x = call.required_output
    process_group = backend.process_group(x)
    return _launch_message(
        backend,
        x,
        lambda: process_group.recv([_as_bytes(x)], 0, DATA_TAG),
    )


def _launch_message(
    backend: ProcessGroupBackend,
    x: Tensor,
    launch: Callable[[], TorchWork],
) -> BackendCall:
    """Launch a send or recv of `x`: see Note [Calls on NCCL]."""
    policy = backend.policy(x)
    if policy.coalesces_messages:
        process_group = backend.process_group(x)
        process_group._start_coalescing()
        launch()
        work = process_group._end_coalescing()
    else:
        work = launch()
    return StreamCall([work]) if policy.is_stream_ordered else MessageCall([work])


def _barrier(backend: ProcessGroupBackend, call: Call) -> BackendCall:
    return BackendCall([backend.gloo.barrier()])


Launch = Callable[[ProcessGroupBackend, Call], BackendCall]


def _unless_empty(launch: Launch) -> Launch:
    """`launch` for calls that move bytes; for operations whose tensor is empty on all members or on
    none.
    """

    def launch_unless_empty(backend: ProcessGroupBackend, call: Call) -> BackendCall:
        tensor = call.input if call.input is not None else call.output
        if tensor is not None and tensor.numel() == 0:
            return BackendCall(())
        return launch(backend, call)

    return launch_unless_empty


_DISPATCH: dict[Op, Launch] = {
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
    backend: ProcessGroupBackend,
    x: Tensor,
    works: Sequence[TorchWork],
    finish: Callable[[], object] | None = None,
) -> BackendCall:
    """The handle of collectives on tensors like `x`."""
    is_stream_ordered = backend.policy(x).is_stream_ordered
    return StreamCall(works, finish) if is_stream_ordered else BackendCall(works, finish)


def _chunks_at_root(buffer: Tensor | None, size: int) -> list[Tensor]:
    """The root's buffer of `size` wholes, as bytes; [] on the other members."""
    if buffer is None:
        return []
    return list(_as_bytes(buffer).chunk(size))


def _send_to_all(
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


def _exchanges_of_two(backend: ProcessGroupBackend, call: Call, x: Tensor) -> bool:
    """Whether the path of Note [Two ranks] applies."""
    return len(call.ranks) == 2 and backend.policy(x).exchanges_of_two


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
