"""The process groups of torch.distributed that one group of ranks uses, one for each device type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from weft.comm.backend_policy import BackendPolicy, policy_of
from weft.comm.backend_work import TorchWork
from weft.comm.transport import Reduce


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
    def shutdown(self) -> None: ...


class DeviceGroups:
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

    def disconnect(self, device_type: str) -> TorchProcessGroup:
        """Forget the process group for a device type."""
        return self._process_groups.pop(device_type)

    def policy(self, x: Tensor) -> BackendPolicy:
        """How tensors on the device of `x` are carried."""
        return policy_of(x.device.type, deterministic=self.deterministic)

    @property
    def connected(self) -> Mapping[str, TorchProcessGroup]:
        """Device type -> process group, of those that are connected."""
        return self._process_groups
