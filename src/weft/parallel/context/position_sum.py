"""Sums over the positions of whole sequences under context parallelism: the `PositionSum` seam of losses of documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.models.common.preference import PositionSum, PreferenceLoss


class ContextPositionSum(PositionSum):
    """All-reduce over the ranks that share each sequence.

    Each of them computes 1 / num_ranks of the loss from the same sums, so the gradient of a rank's
    own part is that of the whole loss: num_ranks times the gradient of the rank's share.
    """

    def __init__(self, comm: Comm, axis: Axis) -> None:
        super().__init__()
        self.comm, self.axis = comm, axis
        self.num_ranks = comm.degree(axis)

    def forward(self, sums: Tensor) -> Tensor:
        """sums of this rank's positions -> of all positions."""
        total: Tensor = _SharedSum.apply(sums, self.comm, self.axis)  # type: ignore[no-untyped-call]
        return total


class _SharedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, comm: Comm, axis: Axis) -> Tensor:
        ctx.num_ranks = comm.degree(axis)
        return comm.all_reduce(sums.contiguous(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.num_ranks, None, None


def replace_position_sums(blocks: Mapping[str, nn.Module], comm: Comm, axis: Axis) -> None:
    """Let losses of documents in these blocks see whole sequences."""
    for block in blocks.values():
        for module in block.modules():
            if isinstance(module, PreferenceLoss):
                module.position_sum = ContextPositionSum(comm, axis)
