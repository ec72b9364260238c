"""Asynchronous tensor parallelism: products of linears in chunks, one a rank, each of which is sent while another is multiplied.

Note [Products in chunks]
    Under sequence parallelism an all-gather comes before a column-parallel product and a reduce-scatter
    after a row-parallel one, and neither has anything to hide behind. Both are taken apart: a chunk is
    one rank's part of the sequence, and passes around a ring. Rank 0 of four:

        gathered_products       multiplies   x0      x3      x2      x1           own chunk first
                                receives         x3      x2      x1
        scattered_product       multiplies   y3      y2      y1      y0           own chunk last
                                receives         y3      y2      y1               sums of ranks before, to be added

    The gradient of the second is the first: the parts of dy go around while they are multiplied for dx.
    The gradient of the first needs no chunks: its reduce-scatter runs beside the weight gradients, see
    Note [Region order]. Either sends what the collective would have: n - 1 parts of the sequence a rank.

Source: Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import ops
from weft.comm.comm import Comm
from weft.comm.hop import start_hop
from weft.core.mesh import Axis
from weft.models.common.linear_products import rows


def gathered_products(
    x_BsD: Tensor, matrices: Sequence[Tensor], comm: Comm, axis: Axis
) -> tuple[Tensor, list[Tensor]]:
    """The parts of all ranks of the axis, x_BSD, and its products with matrices_DO, y_BSO."""
    num_ranks = comm.degree(axis)
    x_nBsD = x_BsD.new_empty((num_ranks, *x_BsD.shape))
    parts = x_nBsD.unbind()
    parts[comm.index(axis)].copy_(x_BsD)  # hops send from and receive into this memory alone
    batch, length, _ = x_BsD.shape
    outputs = [x_BsD.new_empty(batch, num_ranks * length, each.shape[1]) for each in matrices]
    parts_of_outputs = [y_BSO.split(length, 1) for y_BSO in outputs]
    for place in _arriving(parts, comm, axis):
        for matrix, of_output in zip(matrices, parts_of_outputs, strict=True):
            torch.bmm(parts[place], matrix.expand(batch, -1, -1), out=of_output[place])
    return _whole(x_nBsD), outputs


def _arriving(parts: Sequence[Tensor], comm: Comm, axis: Axis) -> Iterator[int]:
    """The places of the parts of all ranks, each once it is there, this rank's own first; the next one
    arrives while one is used.
    """
    num_ranks, index = comm.degree(axis), comm.index(axis)
    places = [(index - turn) % num_ranks for turn in range(num_ranks)]
    for place, next_place in pairwise(places):
        hop = start_hop(comm, axis, parts[place], parts[next_place])
        yield place  # the caller multiplies while the hop is under way
        hop.wait()  # before `parts[next_place]` is read, and sent on in the next turn
    yield places[-1]


def _whole(x_nBsD: Tensor) -> Tensor:
    """Parts of a sequence in order -> x_BSD; of one sequence they lie in order already."""
    x_BSD = x_nBsD.transpose(0, 1).flatten(1, 2)
    unviewed: Tensor = torch.ops.aten._unsafe_view(x_BSD, x_BSD.shape)
    return unviewed  # no view in the eyes of autograd


def scattered_linear(x_BSI: Tensor, weight_OI: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """`scattered_product` of x and W^T, which autograd differentiates."""
    y_BsO: Tensor = _ScatteredLinear.apply(x_BSI, weight_OI, comm, axis)  # type: ignore[no-untyped-call]
    return y_BsO


class _ScatteredLinear(torch.autograd.Function):
    """x W^T; backward: dy of all ranks, in chunks, then the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, comm: Comm, axis: Axis) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        ctx.axis = axis
        return scattered_product(x, weight.t(), comm, axis)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = None
        d_weight = None
        if torch.is_grad_enabled():  # a backward that is differentiated again
            dy = ops.all_gather(dy, ctx.comm, ctx.axis, dim=1)
            dx = dy @ weight
        else:
            matrices = [weight] if needs_x else []
            dy, products = gathered_products(dy, matrices, ctx.comm, ctx.axis)
            dx = products[0] if needs_x else None
        if needs_weight:
            d_weight = rows(dy).t() @ rows(x)
        return dx, d_weight, None, None


def scattered_product(x_BSI: Tensor, matrix_IO: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """This rank's part of the sequence, y_BsO, of the sum over ranks of their x times their matrix."""
    num_ranks, index = comm.degree(axis), comm.index(axis)
    parts = x_BSI.chunk(num_ranks, 1)
    hop = None
    for turn in range(num_ranks):
        # this sum is sent on num_ranks - 1 - turn times, and is whole at the rank that keeps the part
        part_BsI = parts[(index - 1 - turn) % num_ranks]
        total = torch.bmm(part_BsI, matrix_IO.expand(len(part_BsI), -1, -1))
        if hop is not None:
            total += hop.wait()  # what was sent in the turn before is free again, too
        if turn < num_ranks - 1:
            hop = start_hop(comm, axis, total, torch.empty_like(total))
    return total
