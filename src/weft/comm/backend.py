"""Launching flat calls on the process groups of a group of ranks, comparing their signatures, and aborting them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from weft.comm.backend_work import BackendCall, CheckedStreamCall, MessageCall, StreamCall
from weft.comm.backends import (
    OPERATIONS,
    DeviceGroup,
    TorchProcessGroup,
    TorchWork,
    launch_recv,
    launch_send,
    policy_of,
)
from weft.comm.shared_group import SharedGroup
from weft.comm.signature import (
    check_signatures,
    decode_signature,
    digests_agree,
    encode_signature,
    signature_digest,
)
from weft.comm.transport import Call, Reduce
from weft.errors import MismatchError

MAX_RANKS_COMPARED_BY_TEXT = 8
"""In larger groups, members compare digests of their signatures first."""
EXCHANGE_TIMEOUT_S = 60.0
SIGNATURE_TAG, ABORT_TAG = 1, 2


class ProcessGroupBackend:
    """The process groups of one group of ranks, one for each device type, and their calls.

    Args:
        connect: makes the process group for a device type, `connect("cpu")`, or the group in shared
            memory; it may block until all members call it.
        reduce_ops: torch.distributed's ReduceOp for each reduction.
        scatter_options: torch.distributed's ReduceScatterOptions for each reduction.
        deterministic: whether reductions are in rank order on every backend.

    Attributes:
        connected: device type -> its group, of those that are connected.
        is_aborted: whether `abort` was called: what calls on devices wrote is not to be used.
    """

    def __init__(
        self,
        connect: Callable[[str], TorchProcessGroup | SharedGroup],
        reduce_ops: Mapping[Reduce, Any],
        *,
        scatter_options: Mapping[Reduce, Any] | None = None,
        deterministic: bool = False,
    ) -> None:
        self.connected: dict[str, DeviceGroup | SharedGroup] = {}
        self.is_aborted = False
        self._connect = connect
        self._reduce_ops = reduce_ops
        self._scatter_options = scatter_options or {}
        self._deterministic = deterministic

    def carrier(self, device_type: str) -> DeviceGroup | SharedGroup:
        """What carries tensors on a device type; connected when it is first asked for."""
        found = self.connected.get(device_type)
        if found is None:
            made = self._connect(device_type)
            policy = policy_of(device_type, deterministic=self._deterministic)
            found = (
                made
                if isinstance(made, SharedGroup)
                else DeviceGroup(made, policy, self._reduce_ops, self._scatter_options)
            )
            self.connected[device_type] = found
        return found

    def group(self, device_type: str) -> DeviceGroup:
        """The process group for tensors on a device type."""
        found = self.carrier(device_type)
        assert isinstance(found, DeviceGroup), "calls in shared memory do not come here"
        return found

    def launch(self, call: Call, device_type: str) -> BackendCall:
        """Hand `call` to what carries its tensors."""
        carrier = self.carrier(device_type)
        if isinstance(carrier, SharedGroup):
            return carrier.launch(call)
        return OPERATIONS[call.op](carrier, call)

    def launch_messages(self, calls: Sequence[Call]) -> list[BackendCall]:
        """Launch messages on the group of their axis: see Note [Messages on NCCL].

        A launch has at most one message to and one from each rank.
        """
        launched: list[BackendCall] = []
        for together in _without_repeated_pairs(calls):
            group = self.group(together[0].device.type)
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
        group = self.group(device.type)
        checking = group.process_group.allreduce([total], group.reduce_ops["sum"])
        launched = self.launch(call, device.type)

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
        group = self.group("cpu")
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
            work = self.group("cpu").send_to_all(own, received.view(-1), size)
            return BackendCall([work], compare)
        peer = 1 - call.index
        received[call.index].copy_(own)
        gloo = self.group("cpu").process_group
        recv = gloo.recv([received[peer]], peer, SIGNATURE_TAG)
        send = gloo.send([own], peer, SIGNATURE_TAG)
        return MessageCall([recv, send], compare)

    def abort(self, index: int) -> None:
        """Fail what is in flight on devices, and on the CPU: gloo has no such call, but a recv that
        times out closes all connections.
        """
        self.is_aborted = True
        for device_type, carrier in list(self.connected.items()):
            if isinstance(carrier, SharedGroup):
                carrier.abort()
            elif device_type != "cpu":
                carrier.process_group.abort()
        gloo = self.connected.get("cpu")
        if not isinstance(gloo, DeviceGroup):
            return
        peer = 1 if index == 0 else 0
        buffer = torch.empty(1, dtype=torch.uint8)
        never_sent = gloo.process_group.recv([buffer], peer, ABORT_TAG)
        with contextlib.suppress(RuntimeError):
            never_sent.wait(timedelta(milliseconds=1))

    def shut_down(self) -> None:
        """End groups of devices whose calls are all complete; those of the CPU end by themselves."""
        for device_type in list(self.connected):
            if device_type != "cpu":
                process_group = self.group(device_type).process_group
                del self.connected[device_type]
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
