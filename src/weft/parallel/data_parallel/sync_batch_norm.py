"""`SyncBatchNorm`: batches are normalised by the statistics of all ranks, as one process normalises the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.comm.comm import Comm, comm_or_world
from weft.comm.ops import copy_to_region, reduce_from_region
from weft.core.mesh import Axis
from weft.parallel.dp import AXIS as DP


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation of x[N, C, ...] over the samples of all ranks of `axis`, also on CPUs.

        net = weft.DistributedDataParallel(weft.SyncBatchNorm.convert(net))

    Mean and variance are those of the whole batch, whatever part of it a rank has; gradients flow
    back to the inputs of all ranks. Two all-reduces a forward and two a backward, of the number of
    channels each. In evaluation it is BatchNorm.

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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        num_own = wide.new_full((1,), x.numel() // x.shape[1])
        *sums, count = self._total(torch.cat([wide.sum(dims), num_own])).split([x.shape[1], 1])
        mean = sums[0] / count
        centred = wide - mean.view(shape)
        variance = self._total(centred.square().sum(dims)) / count
        self._track(mean, variance, count)
        normalised = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        result: Tensor = normalised.to(x.dtype)
        return result

    def _total(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, which each uses for its own samples: gradients are summed, too."""
        total = reduce_from_region(partial, self.comm, self.axis)
        return copy_to_region(total, self.comm, self.axis)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics, as torch's BatchNorm does."""
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        assert share is not None, "statistics that are tracked have a momentum or a count"
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


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
