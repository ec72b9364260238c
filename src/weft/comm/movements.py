"""The algorithms that move entries unchanged on a process group of torch.distributed: gathers, all-to-all, messages, barrier."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.comm.backend_work import BackendCall, MessageCall, backend_call
from weft.comm.device_groups import DeviceGroup, TorchWork, as_bytes
from weft.comm.reductions import SMALL_BYTES
from weft.comm.transport import Call

DATA_TAG = 0

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
    """See Note [Two ranks] in comm/reductions.py."""
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
    """In place."""
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


def _chunks_at_root(buffer: Tensor | None, size: int) -> list[Tensor]:
    """The root's buffer of `size` wholes, as bytes; [] on the other members."""
    return [] if buffer is None else list(as_bytes(buffer).chunk(size))


def _copy_unless_same(source: Tensor, destination: Tensor) -> None:
    """Copy, unless both are the same memory: the input of an in-place collective is a part of its
    output.
    """
    if source.data_ptr() != destination.data_ptr():
        destination.copy_(source)
