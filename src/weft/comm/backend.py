"""Launching flat calls on torch.distributed backends, comparing their signatures, and aborting them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
from torch import Tensor

from weft.comm.backend_ops import OPERATIONS, launch_recv, launch_send, send_to_all
from weft.comm.backend_work import (
    BackendCall,
    CheckedStreamCall,
    MessageCall,
    StreamCall,
    TorchWork,
)
from weft.comm.device_groups import DeviceGroups
from weft.comm.signature import (
    check_signatures,
    decode_signature,
    digests_agree,
    encode_signature,
    signature_digest,
)
from weft.comm.transport import Call
from weft.errors import MismatchError

MAX_RANKS_COMPARED_BY_TEXT = 8
"""In larger groups, members compare digests of their signatures first."""
EXCHANGE_TIMEOUT_S = 60.0
SIGNATURE_TAG, ABORT_TAG = 1, 2


class ProcessGroupBackend(DeviceGroups):
    """Launches the calls of one group of ranks; for the arguments see `DeviceGroups`.

    Attributes:
        is_aborted: whether `abort` was called: what calls on devices wrote is not to be used.
    """

    is_aborted = False

    def launch(self, call: Call) -> BackendCall:
        """Hand `call` to the process group of its tensors."""
        return OPERATIONS[call.op](self, call)

    def launch_messages(self, calls: Sequence[Call]) -> list[BackendCall]:
        """Launch messages on the group of their axis: see Note [Messages on NCCL].

        A launch has at most one message to and one from each rank.
        """
        launched: list[BackendCall] = []
        for together in _without_repeated_pairs(calls):
            process_group = self.process_group_for(together[0].device.type)
            process_group._start_coalescing()
            for call in together:
                self._add_message(call)
            work = process_group._end_coalescing()
            launched += [StreamCall([work]) for _ in together]
        return launched

    def _add_message(self, call: Call) -> TorchWork:
        sender, receiver = call.ranks
        source = call.members.index(sender)
        destination = call.members.index(receiver)
        if call.op == "send":
            return launch_send(self, call, to=destination)
        return launch_recv(self, call, source=source)

    def launch_checked(self, call: Call, device: torch.device) -> BackendCall:
        """Hand `call` to the process group of its tensors, after a digest of its signature; waiting
        raises MismatchError.
        """
        own = signature_digest(call)
        total = own.to(device, copy=True)
        process_group = self.process_group_for(device.type)
        checking = process_group.allreduce([total], self.reduce_ops["sum"])
        launched = self.launch(call)

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
        work = self.gloo.allreduce([total], self.reduce_ops["sum"])

        def compare() -> None:
            self._compare_with_total(call, own, total)

        return BackendCall([work], compare)

    def _compare_with_total(
        self,
        call: Call,
        own: Tensor,
        total: Tensor,
    ) -> None:
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
            work = send_to_all(self.gloo, own, received.view(-1), size)
            return BackendCall([work], compare)
        peer = 1 - call.index
        received[call.index].copy_(own)
        recv = self.gloo.recv([received[peer]], peer, SIGNATURE_TAG)
        send = self.gloo.send([own], peer, SIGNATURE_TAG)
        return MessageCall([recv, send], compare)

    def abort(self, index: int) -> None:
        """Fail what is in flight on devices, and on the CPU: gloo has no such call, but a recv that
        times out closes all connections.
        """
        self.is_aborted = True
        for device_type, process_group in list(self.connected.items()):
            if device_type != "cpu":
                process_group.abort()
        if "cpu" not in self.connected:
            return
        peer = 1 if index == 0 else 0
        buffer = torch.empty(1, dtype=torch.uint8)
        never_sent = self.gloo.recv([buffer], peer, ABORT_TAG)
        with contextlib.suppress(RuntimeError):
            never_sent.wait(timedelta(milliseconds=1))

    def shut_down(self) -> None:
        """End groups of devices whose calls are all complete; those of the CPU end by themselves."""
        for device_type in list(self.connected):
            if device_type != "cpu":
                process_group = self.disconnect(device_type)
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
