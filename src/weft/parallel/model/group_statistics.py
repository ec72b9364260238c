"""BatchNorm by the statistics of several data ranks: one all-gather a forward, one all-reduce a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from weft.comm.comm import Comm
from weft.core.dimension import sequence_axes
from weft.core.mesh import Axis

# Note [Statistics of a group]
# Micro-batch m of data rank d of D is number m D + d of a step, and has the samples from there on (`layout_of`). So G
# neighbouring data ranks, G a divisor of D, have in each of their micro-batches m together G micro-batches of consecutive
# samples, which any other layout normalises together, too: one device by a micro-batch that is G times as large.
#
# A rank gathers mean, variance and number of samples of every member. Their variances are added with the squared distances
# of their means, as Welford's formula joins two parts (Chan et al. 1979), so no digits are lost where a mean is large. A
# forward that is recomputed gathers again, in the same place of the backward on all ranks.


@dataclass(frozen=True)
class StatisticsGroup:
    """Neighbouring data ranks whose micro-batches BatchNorm normalises together.

    Attributes:
        axis: mesh axes with these ranks.
        size: how many ranks; of those along `axis`, so many in a row.
        fixed_order: whether sums have the same bits whatever the number of data ranks.
    """

    comm: Comm
    axis: Axis
    size: int
    fixed_order: bool = False

    @classmethod
    def of(cls, comm: Comm, size: int, *, fixed_order: bool) -> StatisticsGroup | None:
        """The group of this rank along the innermost data axes that hold it; None where it is alone."""
        names = [name for name in comm.mesh.wide_axes if name in sequence_axes()]
        for start in reversed(range(len(names))):
            axis = tuple(names[start:])
            if size > 1 and comm.degree(axis) % size == 0:
                return cls(comm, axis, size, fixed_order)
        return None

    def __call__(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x[N, C, ...] normalised, and mean and unbiased variance of the group, [2, C]."""
        return group_batch_norm(x, weight, bias, self, eps)

    def gather(self, row: Tensor) -> Tensor:
        """The rows of all members, in the order of the samples."""
        first = self.comm.index(self.axis) // self.size * self.size
        rows = self.comm.all_gather(row.unsqueeze(0), self.axis)
        return rows[first : first + self.size]

    def sum(self, row: Tensor) -> Tensor:
        """The sum of the rows of all members."""
        if self.size == self.comm.degree(self.axis) and not self.fixed_order:
            return self.comm.all_reduce(row, self.axis)
        return self.gather(row).sum(0)


def group_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, group: StatisticsGroup, eps: float
) -> tuple[Tensor, Tensor]:
    """The call of a group; modes see one function of torch, as `F.batch_norm` is one."""
    operands = tuple(each for each in (x, weight, bias) if each is not None)
    if has_torch_function(operands):
        seen: tuple[Tensor, Tensor] = handle_torch_function(
            group_batch_norm, operands, x, weight, bias, group, eps
        )
        return seen
    out: tuple[Tensor, Tensor] = _GroupBatchNorm.apply(x, weight, bias, group, eps)  # type: ignore[no-untyped-call]
    return out


class _GroupBatchNorm(torch.autograd.Function):
    """BatchNorm in training by the statistics of a group; 16 bits are computed in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        group: StatisticsGroup,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own_mean, own_variance = _mean_and_variance(wide)
        num_own = wide.new_full((1,), x.numel() // x.shape[1])
        rows = group.gather(torch.cat([own_mean, own_variance, num_own]))
        means, variances, counts = rows.split([x.shape[1], x.shape[1], 1], dim=1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        squares = ((variances + (means - mean).square()) * counts).sum(0)
        variance = squares / count
        weight = torch.ones_like(mean) if weight is None else weight
        ctx.group, ctx.eps, ctx.dtype = group, eps, x.dtype
        ctx.save_for_backward(x, weight, mean, variance, count)
        statistics = torch.stack([mean, squares / (count - 1)])
        ctx.mark_non_differentiable(statistics)
        if not x.numel():
            return x.clone(), statistics
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps), statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        x, dy = x.to(mean.dtype), dy.to(mean.dtype)
        # In evaluation mode the kernel takes the statistics as they are: its gradients of weight and bias are the sums
        # over this rank's samples of dy times the normalised x, and of dy.
        dx, d_weight, d_bias = dy, torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            dx, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        if ctx.needs_input_grad[0]:
            sums = ctx.group.sum(torch.cat([d_weight, d_bias])) / count
            slope = (variance + ctx.eps).rsqrt() * weight
            along, constant = (sums.view(2, -1) * slope).unbind()
            if x.numel():
                dx = dx - F.batch_norm(x, mean, variance, along, constant, eps=ctx.eps)
        gradients = dx.to(ctx.dtype), d_weight, d_bias
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(each if is_needed else None for each, is_needed in needed), None, None


def _mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of the samples x[N, C, ...] for each channel; of none, which have no weight anywhere, zeros."""
    if not x.numel():
        return x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
    if x.is_cpu:  # three times as fast
        return torch.batch_norm_update_stats(x, None, None, 0.0)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x, dims, correction=0)
    return mean, variance
