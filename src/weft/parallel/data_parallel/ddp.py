"""`DistributedDataParallel`: gradients of any module averaged over ranks in buckets, in a plain script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.default_comm import comm_or_world
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError
from weft.parallel.autograd.shard_gradient import mark_gradient
from weft.parallel.dp import AXIS as DP
from weft.parallel.model.buffers import broadcast_buffers
from weft.parallel.zero.global_mean import global_mean
from weft.parallel.zero.grouping import BUCKET_BYTES, bucket_reducer
from weft.parallel.zero.wrapped_params import (
    check_all_wrapped,
    check_not_wrapped,
    check_requires_grad,
    mark_wrapped,
    reject_copy,
    trained_when_wrapped,
)

WRAPPER_NAME = "DistributedDataParallel"


class DistributedDataParallel(nn.Module):
    """The same module on every rank of `axis`; gradients are averaged over the ranks while the
    backward still runs.

    Starts from the first rank's parameters and buffers. After `loss.backward()` call
    `finish_gradient_synchronization()`, then step the optimizer. From then on every rank has the
    first rank's buffers, as under torch's DistributedDataParallel: running statistics of BatchNorm
    are those of its samples, and a batch is normalised by the statistics of its own rank. Gradients are views into flat
    buckets; setting them to None between steps is allowed. A parameter that no rank has used since
    the last step keeps the `.grad` it had, as under torch's DistributedDataParallel with
    `find_unused_parameters`: None at first and after `zero_grad()`, so that optimizers leave it as
    it is; zeros after `zero_grad(set_to_none=False)` of a gradient, so that weight decay shrinks
    it.

    Args:
        module: any module; its forward is called as it is.
        comm: communication with the other ranks; None: the world of torch.distributed is the data
            axis.
        axis: the mesh axis (or axes) over which batches differ.
        bucket_bytes: gradients are reduced in buckets of about this size.

    Raises:
        PlanError: a parameter belongs to a wrapped module already, or is added or unfrozen after
            wrapping; a gradient was set by hand, not by a backward; an optimizer step or a forward
            with gradients follows a backward whose gradients were not synchronised.

    Source: Li et al. 2020, PyTorch Distributed.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        axis: Axis = DP,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__()
        check_not_wrapped(module, WRAPPER_NAME)
        first = next(module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        self.module = module
        self.comm = comm_or_world(comm, axis=axis, device=device)
        self.axis = axis
        broadcast_module(module, self.comm, axis)
        self._params = {
            name: param for name, param in module.named_parameters() if param.requires_grad
        }
        axes = axis_names(axis) if self.comm.degree(axis) > 1 else ()
        self._reducer = bucket_reducer(
            self._params,
            self.comm,
            reduce_axes=dict.fromkeys(self._params, axes),
            bucket_bytes=bucket_bytes,
        )
        for param in self._params.values():
            param.grad = None  # until some rank has used the parameter
        mark_wrapped(module.parameters(), WRAPPER_NAME, reducer=self._reducer)
        self._trained_when_wrapped = trained_when_wrapped(module)
        self._frozen = [
            (name, param) for name, param in module.named_parameters() if not param.requires_grad
        ]
        self._requires_gradient_sync = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Rejected: a copy would not have the communication.

        Raises:
            PlanError: by copy.deepcopy, copy.copy, pickle and torch.save.
        """
        reject_copy(WRAPPER_NAME)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if torch.is_grad_enabled():
            if self._reducer.has_unfinished_reduction:
                raise PlanError(
                    Fault(
                        WRAPPER_NAME,
                        "the gradients of the last backward were not synchronised before this forward",
                        fix="call finish_gradient_synchronization() after the last backward of a step, "
                        "and run the backwards before it under no_sync()",
                    )
                )
            check_requires_grad(self._frozen, self._trained_when_wrapped, WRAPPER_NAME)
            self._reducer.set_requires_gradient_sync(0, self._requires_gradient_sync)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: the backwards of forwards in here reduce nothing."""
        self._requires_gradient_sync = False
        try:
            yield
        finally:
            self._requires_gradient_sync = True

    def global_mean(self, total: Tensor, count: Tensor | float) -> Tensor:
        """The mean loss over what counts on all ranks, to call `backward()` on: a batch with padding
        counts fewer targets than that of another rank, and the mean of the ranks' means is another
        number. Every rank must call it.

            loss = F.cross_entropy(net(x), y, ignore_index=-100, reduction="sum")
            net.global_mean(loss, (y != -100).sum()).backward()

        Args:
            total: sum of this rank's losses, scalar.
            count: of its targets; with several backwards a step, of all of them together.
        """
        return global_mean(self.comm, self.axis, total, count)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks, and take the first rank's buffers.
        Call once, after the last backward of a step.
        """
        check_all_wrapped(self.module, WRAPPER_NAME)
        reducer = self._reducer
        self._check_grads_of_backward()
        reducer.start_remaining()
        used = reducer.used_on_any_rank(self.axis)
        reducer.finish()
        reducer.scale(1.0 / self.comm.degree(self.axis))
        for group in reducer.groups:
            for name, param in group.params.items():
                if param.grad is None and name in used:
                    param.grad = group.grad_view(name)
                mark_gradient(param)
        broadcast_buffers(self.module, self.comm, self.axis)

    def _check_grads_of_backward(self) -> None:
        """Reject gradients that no backward has left: they are of this rank alone."""
        reducer = self._reducer
        for group in reducer.groups:
            for name, param in group.params.items():
                grad = param.grad
                if grad is None or name in reducer.arrived:
                    continue
                if grad.data_ptr() != group.grad_view(name).data_ptr():
                    fault = Fault(
                        WRAPPER_NAME,
                        f".grad of {name} was set by hand, so it is of this rank alone",
                        fix="loss.backward(), which reduces gradients; or add them up with "
                        "comm.all_reduce, without finish_gradient_synchronization()",
                    )
                    raise PlanError(fault)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The module's state dict; every rank holds all of it."""
        return self.module.state_dict()


@torch.no_grad()
def broadcast_module(
    module: nn.Module,
    comm: Comm,
    axis: Axis,
) -> None:
    """Give every rank the first rank's parameters and buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        comm.broadcast_(tensor, axis, root=0)
