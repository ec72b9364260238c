"""Owns `DistributedDataParallel`: the gradient buckets around any module, in a plain script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.adopt import comm_or_world
from weft.comm.comm import Comm
from weft.core.mesh import Axis, axis_names
from weft.parallel.data_parallel.buckets import GradientBuckets


class DistributedDataParallel(nn.Module):
    """The same module on every rank of `axis`; gradients are averaged over the ranks while the backward still runs.

    Starts from the first rank's parameters and buffers. After `loss.backward()` call `finish_gradient_synchronization()`,
    then step the optimizer. Gradients are views into flat buckets; setting them to None between steps is fine.

    Args:
        module: any module; its forward is called as it is.
        comm: this rank's way to the others; None: the world that torch.distributed was initialised with is the data axis.
        axis: the mesh axis (or axes) over which batches differ.
        bucket_bytes: gradients travel in pieces of about this size.

    Source: Li et al. 2020, PyTorch Distributed.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        axis: str | tuple[str, ...] = "dp",
        bucket_bytes: int = 25 * 2**20,
    ) -> None:
        super().__init__()
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        comm = comm_or_world(comm, axis=axis, device=device)
        self.module, self.comm, self.axis = module, comm, axis
        start_as_the_first(module, comm, axis)
        self._params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        for name, param in self._params.items():
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._into_view(name, param))
        self._buckets = GradientBuckets(
            self._params,
            comm=comm,
            reduce=dict.fromkeys(self._params, axis_names(axis) if comm.degree(axis) > 1 else ()),
            stage_of=dict.fromkeys(self._params, 0),
            bucket_bytes=bucket_bytes,
        )
        self._synchronize = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._synchronize and torch.is_grad_enabled():
            self._buckets.set_requires_gradient_sync(0)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: backwards of forwards in here reduce nothing."""
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks. Call once, after the last backward of a step."""
        for name, param in self._params.items():
            if param.grad is None:
                self._buckets.views[name].zero_()
                param.grad = self._buckets.views[name]
        self._buckets.finish()
        self._buckets.scale(1.0 / self.comm.degree(self.axis))

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state dict; every rank holds all of it."""
        return self.module.state_dict()

    def _into_view(self, name: str, param: Tensor) -> None:
        """Bring a gradient that was set to None and made anew back into its bucket."""
        view = self._buckets.views[name]
        if param.grad is not view:
            assert param.grad is not None, "the hook runs after the gradient was accumulated"
            view.copy_(param.grad)
            param.grad = view


@torch.no_grad()
def start_as_the_first(module: nn.Module, comm: Comm, axis: Axis) -> None:
    """Give every rank the first one's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        comm.broadcast_(tensor, axis, root=0)
