"""What of a parameter group is sharded, the dtypes in which it is held, and which of its tensors share memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from weft.core.mesh import Axis, axis_names

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True)
class ShardingPolicy:
    """What of a parameter group is sharded over the ranks that would hold copies, and in which
    dtypes it is held.

    Attributes:
        zero: 0 nothing is sharded, 1 optimizer states, 2 gradients too, 3 parameters too.
        params: dtype of the values that the optimizer updates.
        compute: dtype in which blocks compute and parameters are all-gathered.
        reduce: dtype in which gradients are accumulated over micro-batches and reduced over ranks.
        grad_scale: factor of the sum of gradients over ranks: 1, or 1 / ranks for the mean.
        keeps_unsharded_grad: whether unsharded gradients stay allocated between steps and are
            reduced once a step, in place; else each backward allocates them, and they are reduced
            whenever they are complete.
        keeps_sharded_grad: whether reduced gradients stay allocated; else `take_reduced_grads`
            hands them over.
        fixed_order: whether gradients are added in the tree of `weft.parallel.zero.fixed_order`.
        fills_freed_params: whether parameters are NaN while their memory is freed.
    """

    zero: ZeroStage
    params: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad_scale: float = 1.0
    keeps_unsharded_grad: bool = False
    keeps_sharded_grad: bool = True
    fixed_order: bool = False
    fills_freed_params: bool = False

    @cached_property
    def keeps_param_memory(self) -> bool:
        """Whether parameters stay in their own memory, because they are neither sharded nor cast."""
        has_one_dtype = self.params == self.compute == self.reduce
        return self.zero == 0 and has_one_dtype

    @cached_property
    def keeps_both_grads(self) -> bool:
        """Whether both the unsharded and the reduced gradient stay allocated."""
        return self.keeps_unsharded_grad and self.keeps_sharded_grad

    @cached_property
    def shares_grad_memory(self) -> bool:
        """Whether the sharded gradient is a view into the unsharded one."""
        has_one_dtype = self.reduce == self.params
        return self.keeps_both_grads and has_one_dtype

    @cached_property
    def accumulates_in_place(self) -> bool:
        """Whether autograd adds to the unsharded gradient itself, whose views are the parameters'
        `.grad`.
        """
        if self.fixed_order:
            return False
        has_one_dtype = self.compute == self.reduce
        return self.keeps_both_grads and has_one_dtype

    @cached_property
    def scales_before_reduction(self) -> bool:
        """Whether gradients are multiplied by `grad_scale` before their sum, which float16 may not hold where it
        holds their mean.
        """
        return self.reduce == torch.float16

    @cached_property
    def sums_microbatches(self) -> bool:
        """Whether the gradients of micro-batches are added in the fixed order before they are
        reduced; else each one is reduced, and the sums are added.
        """
        return self.fixed_order and self.keeps_unsharded_grad

    @cached_property
    def sums_reduced(self) -> bool:
        """Whether reduced gradients of micro-batches are added in the fixed order."""
        return self.fixed_order and not self.keeps_unsharded_grad


@dataclass(frozen=True)
class WrapperSharding:
    """How a wrapper shards a module.

    Attributes:
        axis: mesh axes over which parameters are sharded.
        replicate: further axes over which batches differ, along which shards are copies.
        zero: 1 shards optimizer states, 2 gradients too, 3 parameters too.
        compute: dtype in which blocks compute; None: that of the parameters.
        reduce: dtype in which gradients are accumulated and reduced; None: that of the parameters.
    """

    axis: Axis
    replicate: tuple[str, ...]
    zero: Literal[1, 2, 3]
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        """All axes over which batches differ."""
        return (*self.replicate, *axis_names(self.axis))

    def policy(self, dtype: torch.dtype, *, num_parts: int) -> ShardingPolicy:
        """That of parameters of this dtype, whose gradients are means over `num_parts` ranks."""
        return ShardingPolicy(
            self.zero,
            params=dtype,
            compute=self.compute or dtype,
            reduce=self.reduce or dtype,
            grad_scale=1.0 / num_parts,
            keeps_sharded_grad=False,
            fills_freed_params=True,
        )
