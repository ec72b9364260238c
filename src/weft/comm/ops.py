"""Owns the differentiable operations: each is a pair of collectives, one forward, its adjoint backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.comm import pieces
from weft.comm.comm import Comm
from weft.core.mesh import Axis

Step = Callable[[Tensor], Tensor]

# Note [Adjoint pairs]
# What a tensor is along an axis decides what its gradient is:
#
#     kept      every rank holds the same value, and it counts once       its gradient is kept
#     partial   every rank holds its own value of the same shape          its gradient is partial
#     cut       every rank holds a piece, joined they are the value       its gradient is cut
#
# The inner product of two kept tensors is taken on any one rank, of two partial or cut ones it is summed over ranks.
# With that, backward is the exact adjoint of forward, <A x, y> = <x, A* y>, and the pairs come in twos:
#
#     enter    kept -> partial   identity          adjoint: leave
#     leave    partial -> kept   all_reduce        adjoint: enter
#     gather   cut -> partial    all_gather        adjoint: scatter
#     scatter  partial -> cut    reduce_scatter    adjoint: gather
#     split    kept -> cut       own slice         adjoint: join
#     join     cut -> kept       all_gather        adjoint: split
#     all_to_all                 cut one way -> cut another way    adjoint: back again
#
# Each backward is written with its adjoint op, so all of them can be differentiated again.


def enter(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """Identity; the gradient is all-reduced. Where a kept tensor enters work that differs among ranks."""
    if comm.degree(axis) == 1:
        return x
    return _pair(x, lambda x: x.view_as(x), lambda grad: leave(grad, comm, axis))


def leave(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """Sum over the axis; the gradient passes. Where partial results leave as one."""
    if comm.degree(axis) == 1:
        return x
    return _pair(x, lambda x: comm.all_reduce(x, axis), lambda grad: enter(grad, comm, axis))


def gather(x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Joined along `dim` for work that differs among ranks; the gradient is reduce-scattered."""
    if comm.degree(axis) == 1:
        return x
    return _pair(
        x,
        lambda x: comm.all_gather(x, axis, dim=dim, sizes=sizes),
        lambda grad: scatter(grad, comm, axis, dim, sizes=sizes),
    )


def scatter(x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's piece along `dim` of the sum; the gradient is all-gathered."""
    if comm.degree(axis) == 1:
        return x
    return _pair(
        x,
        lambda x: comm.reduce_scatter(x, axis, dim=dim, sizes=sizes),
        lambda grad: gather(grad, comm, axis, dim, sizes=sizes),
    )


def split(x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's slice along `dim` of a kept tensor; the gradient is all-gathered."""
    degree, index = comm.degree(axis), comm.index(axis)
    if degree == 1:
        return x
    lengths = pieces.cut_sizes(x.shape[dim], degree, sizes, what=f"split over {axis}: dim {dim}")
    return _pair(
        x,
        lambda x: x.narrow(dim, sum(lengths[:index]), lengths[index]).clone(memory_format=torch.contiguous_format),
        lambda grad: join(grad, comm, axis, dim, sizes=sizes),
    )


def join(x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Joined along `dim` into a kept tensor; the gradient is this rank's slice."""
    if comm.degree(axis) == 1:
        return x
    return _pair(
        x,
        lambda x: comm.all_gather(x, axis, dim=dim, sizes=sizes),
        lambda grad: split(grad, comm, axis, dim, sizes=sizes),
    )


def all_to_all(
    x: Tensor,
    comm: Comm,
    axis: Axis,
    dim: int = 0,
    *,
    join_dim: int | None = None,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Piece j along `dim` to member j; the pieces that come are joined along `join_dim` (the same by default).

        dim 0, join_dim 1, two ranks:   [a0]   [b0]        [a0 b0]   [a1 b1]
                                        [a1]   [b1]   ->

    Args:
        send_sizes: lengths along `dim` of the pieces sent; even by default.
        recv_sizes: lengths along `join_dim` of the pieces received; by default as sent, or for another `join_dim` as
            long as this rank's own.
    """
    degree = comm.degree(axis)
    if degree == 1:
        return x
    dim, end = dim % x.dim(), (dim if join_dim is None else join_dim) % x.dim()
    sent = pieces.cut_sizes(x.shape[dim], degree, send_sizes, what=f"all_to_all over {axis}: dim {dim}")
    default = sent if end == dim else (x.shape[end],) * degree
    taken = tuple(default if recv_sizes is None else recv_sizes)
    return _pair(
        x,
        lambda x: _exchanged(x, comm, axis, _Cut(dim, sent), _Cut(end, taken)),
        lambda grad: all_to_all(grad, comm, axis, end, join_dim=dim, send_sizes=taken, recv_sizes=sent),
    )


@dataclass(frozen=True)
class _Cut:
    dim: int
    sizes: tuple[int, ...]


def _exchanged(x: Tensor, comm: Comm, axis: Axis, cut: _Cut, joined: _Cut) -> Tensor:
    own = pieces.with_length(x.shape, cut.dim, cut.sizes[comm.index(axis)])
    shapes = [pieces.with_length(own, joined.dim, size) for size in joined.sizes]
    line = comm.all_to_all(
        pieces.pack(x, cut.dim, cut.sizes),
        axis,
        send_sizes=pieces.counts(x.shape, cut.dim, cut.sizes),
        recv_sizes=[math.prod(shape) for shape in shapes],
    )
    return pieces.unpack(line, shapes, joined.dim)


class _Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Step, adjoint: Step) -> Tensor:
        ctx.adjoint = adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(grads[0]), None, None


def _pair(x: Tensor, forward: Step, adjoint: Step) -> Tensor:
    return cast(Tensor, _Pair.apply(x, forward, adjoint))  # type: ignore[no-untyped-call]
