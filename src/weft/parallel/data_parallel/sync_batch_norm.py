"""`SyncBatchNorm`: batches are normalised by the statistics of all ranks, as one process normalises the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.comm.comm import Comm, comm_or_world
from weft.core.mesh import Axis
from weft.models.common.buffer_updates import update_running_values
from weft.parallel.dp import AXIS as DP
from weft.parallel.model.group_statistics import StatisticsGroup


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of x[N, C, ...] over the samples of all ranks of `axis`, also on CPUs.

        net = weft.DistributedDataParallel(weft.SyncBatchNorm.convert(net))

    Mean and variance are those of the whole batch, whatever part of it a rank has; gradients flow
    back to the inputs of all ranks. One all-gather a forward and one all-reduce a backward, of two numbers
    a channel. In evaluation it is BatchNorm.

    Args:
        num_features: C.
        comm: communication with the other ranks; None: the world of torch.distributed.
        options: those of torch.nn.BatchNorm2d.

    Source: torch.nn.SyncBatchNorm, which needs GPUs.
    """

    def __init__(
        self, num_features: int, comm: Comm | None = None, *, axis: Axis = DP, **options: Any
    ) -> None:
        super().__init__(num_features, **options)
        self.comm = comm_or_world(
            comm, axis=axis, device=torch.device(options.get("device") or "cpu")
        )
        self.axis = axis

    @staticmethod
    def convert(module: nn.Module, comm: Comm | None = None, *, axis: Axis = DP) -> nn.Module:
        """Put a SyncBatchNorm in the place of each BatchNorm of a module; returns it, or the one in its
        own place. Parameters and running statistics are the same tensors.
        """
        device = next((param.device for param in module.parameters()), torch.device("cpu"))
        shared = comm_or_world(comm, axis=axis, device=device)
        if isinstance(module, _BatchNorm):
            return _converted(module, shared, axis)
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
                    setattr(parent, name, _converted(child, shared, axis))
        return module

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"expected x[N, C, ...] (got {x.dim()} dimensions)")

    def forward(self, x: Tensor) -> Tensor:
        """x[N, C, ...] normalised for each channel."""
        self._check_input_dim(x)
        if not self.training or self.comm.degree(self.axis) == 1:
            own: Tensor = super().forward(x)
            return own
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (
            None if param is None else param.to(wide) for param in (self.weight, self.bias)
        )
        group = StatisticsGroup(self.comm, self.axis, self.comm.degree(self.axis))
        out, statistics = group(x, weight, bias, self.eps)
        if self.running_mean is not None:
            update_running_values(self, statistics)
        return out


def _converted(module: _BatchNorm, comm: Comm, axis: Axis) -> SyncBatchNorm:
    new = SyncBatchNorm(
        module.num_features,
        comm,
        axis=axis,
        eps=module.eps,
        momentum=module.momentum,
        affine=module.affine,
        track_running_stats=module.track_running_stats,
    )
    new._parameters.update(module._parameters)
    new._buffers.update(module._buffers)
    return new.train(module.training)
