"""How torch.distributed backends carry calls: the policies of gloo and NCCL, and their process groups by device type.

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

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm.transport import Reduce


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
    native_reduce: bool
    native_gather: bool
    exchanges_of_two: bool
    is_stream_ordered: bool
    launches_from_caller: bool
    checks_on_device: bool
    messages_on_axis_group: bool
    connects_at_start: bool
    totals_along_axes: bool
    compares_in_call: bool = False


GLOO = BackendPolicy(
    name="gloo",
    native_reduce=False,
    native_gather=False,
    exchanges_of_two=True,
    is_stream_ordered=False,
    launches_from_caller=False,
    checks_on_device=False,
    messages_on_axis_group=False,
    connects_at_start=False,
    totals_along_axes=False,
)
NCCL = BackendPolicy(
    name="NCCL",
    native_reduce=True,
    native_gather=True,
    exchanges_of_two=False,
    is_stream_ordered=True,
    launches_from_caller=True,
    checks_on_device=True,
    messages_on_axis_group=True,
    connects_at_start=True,
    totals_along_axes=True,
)

SHARED_MEMORY = replace(GLOO, name="shared memory", compares_in_call=True)
"""Of ranks on one host: see comm/shared_group.py."""

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


class TorchWork(Protocol):
    """The part of torch.distributed.Work that is used; `wait` raises RuntimeError on failure and on
    time-out.
    """

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


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


class NcclGroups:
    """Makes the communicators of this rank's GPU.

    Args:
        process_group: torch.distributed's ProcessGroupNCCL; None in a build without it.
        device: of this rank.
        timeout: of a call.
    """

    def __init__(self, process_group: Any, device: torch.device, timeout: timedelta) -> None:
        self._process_group = process_group
        self._device = device
        self._timeout = timeout
        self._parent: Any = None
        self._is_planned = False

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
        options = self._process_group.Options(is_high_priority_stream=True)
        options._timeout = self._timeout + WATCHDOG_MARGIN
        if self._parent is not None:
            options.split_from = self._parent
            options.split_color = color
        made = self._process_group(store, index, size, options)
        made.eager_connect_single_device(self._device)
        if self._is_planned and self._parent is None and hasattr(options, "split_from"):
            self._parent = made
        return made

    def leave_out(self) -> None:
        """Take part in a split of the world without a group of this rank."""
        if self._parent is not None:
            self._parent.perform_nocolor_split(self._device)
