"""Differentiable collectives: each pairs a forward collective with its adjoint for backward (Megatron-LM's f and g)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from weft.comm import collectives
from weft.comm.comm import Comm
from weft.core.mesh import Axis

TensorFunction = Callable[[Tensor], Tensor]

# Note [Adjoint pairs]
# The placement of a tensor along an axis (DTensor's words) decides the placement of its gradient:
#
#     replicated   every rank holds the same value, which counts once     its gradient is replicated
#     partial      the value is the sum of what the ranks hold            its gradient is partial
#     sharded      every rank holds one shard of the value                its gradient is sharded
#
# The inner product of two replicated tensors is taken on any one rank; of two partial or sharded ones it is summed over
# the ranks. With that, backward is the exact adjoint of forward, <A x, y> = <x, A* y>, and the functions come in pairs:
#
#     function              placement                 forward          adjoint                Megatron-LM
#     copy_to_region        replicated -> partial     identity         reduce_from_region     f
#     reduce_from_region    partial -> replicated     all_reduce       copy_to_region         g
#     all_gather            sharded -> partial        all_gather       reduce_scatter         gather_from_sequence...
#     reduce_scatter        partial -> sharded        reduce_scatter   all_gather             reduce_scatter_to_sequence...
#     scatter_to_region     replicated -> sharded     own slice        gather_from_region     scatter_to_tensor...
#     gather_from_region    sharded -> replicated     all_gather       scatter_to_region      gather_from_tensor...
#     all_to_all            sharded -> sharded along another dimension; its adjoint is the way back
#
# Each backward calls the adjoint function, so all of them can be differentiated again.


def copy_to_region(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """Identity; the gradient is all-reduced. For a replicated tensor that sharded layers read."""
    if comm.degree(axis) == 1:
        return x
    return _differentiable(x, same_values, lambda grad: reduce_from_region(grad, comm, axis))


def same_values(x: Tensor) -> Tensor:
    """x as another tensor on the same memory: the forward of a function that changes the gradient alone.

    In compiled code no view: of two outputs of a graph, a tensor and a view of it by such a function,
    torch 2.13 makes the second one from the first outside of the graph, without the function.
    """
    if torch.compiler.is_dynamo_compiling():
        unviewed: Tensor = torch.ops.aten._unsafe_view(x, x.shape)
        return unviewed
    return x.view_as(x)


def reduce_from_region(x: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """Sum over the axis; the gradient passes unchanged. For the partial results of sharded layers."""
    if comm.degree(axis) == 1:
        return x
    return _differentiable(
        x, lambda x: comm.all_reduce(x, axis), lambda grad: copy_to_region(grad, comm, axis)
    )


def all_gather(
    x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenation of the shards along `dim`; the gradient is reduce-scattered.

    Args:
        sizes: lengths of the shards along `dim`; equal by default.
    """
    if comm.degree(axis) == 1:
        return x
    return _differentiable(
        x,
        lambda x: comm.all_gather(x, axis, dim=dim, sizes=sizes),
        lambda grad: reduce_scatter(grad, comm, axis, dim, sizes=sizes),
    )


def reduce_scatter(
    x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's shard along `dim` of the sum over the axis; the gradient is all-gathered.

    Args:
        sizes: lengths of the shards along `dim`; equal by default.
    """
    if comm.degree(axis) == 1:
        return x
    return _differentiable(
        x,
        lambda x: comm.reduce_scatter(x, axis, dim=dim, sizes=sizes),
        lambda grad: all_gather(grad, comm, axis, dim, sizes=sizes),
    )


def scatter_to_region(
    x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """This rank's slice along `dim` of a replicated tensor; the gradient is all-gathered.

    Args:
        sizes: lengths of the slices along `dim`; equal by default.
    """
    degree = comm.degree(axis)
    if degree == 1:
        return x
    what = f"scatter_to_region over {axis}: dim {dim}"
    lengths = collectives.split_sizes(x.shape[dim], degree, sizes, what=what)
    index = comm.index(axis)
    start = sum(lengths[:index])

    def forward(x: Tensor) -> Tensor:
        own_slice = x.narrow(dim, start, lengths[index])
        return own_slice.clone(memory_format=torch.contiguous_format)

    def adjoint(grad: Tensor) -> Tensor:
        return gather_from_region(grad, comm, axis, dim, sizes=sizes)

    return _differentiable(x, forward, adjoint)


def gather_from_region(
    x: Tensor, comm: Comm, axis: Axis, dim: int = 0, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenation of the shards along `dim` into a replicated tensor; the gradient is this rank's
    slice.

    Args:
        sizes: lengths of the shards along `dim`; equal by default.
    """
    if comm.degree(axis) == 1:
        return x
    return _differentiable(
        x,
        lambda x: comm.all_gather(x, axis, dim=dim, sizes=sizes),
        lambda grad: scatter_to_region(grad, comm, axis, dim, sizes=sizes),
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
    """Piece j along `dim` goes to member j; the received pieces are concatenated along `join_dim`
    (default: `dim`).

        dim 0, join_dim 1, two ranks:   [a0]   [b0]        [a0 b0]   [a1 b1]
                                        [a1]   [b1]   ->

    Args:
        send_sizes: lengths along `dim` of the pieces sent; equal by default.
        recv_sizes: lengths along `join_dim` of the pieces received; by default `send_sizes`, or for
            another `join_dim` this rank's own length for every piece.
    """
    degree = comm.degree(axis)
    if degree == 1:
        return x
    dim = dim % x.dim()
    join_dim = dim if join_dim is None else join_dim % x.dim()
    what = f"all_to_all over {axis}: dim {dim}"
    sent = collectives.split_sizes(x.shape[dim], degree, send_sizes, what=what)
    if recv_sizes is not None:
        received = tuple(recv_sizes)
    elif join_dim == dim:
        received = sent
    else:
        received = (x.shape[join_dim],) * degree
    split = _Split(dim, sent)
    joined = _Split(join_dim, received)

    def forward(x: Tensor) -> Tensor:
        return _all_to_all_once(x, comm, axis, split=split, joined=joined)

    def adjoint(grad: Tensor) -> Tensor:
        return all_to_all(
            grad, comm, axis, joined.dim, join_dim=dim, send_sizes=received, recv_sizes=sent
        )

    return _differentiable(x, forward, adjoint)


@dataclass(frozen=True)
class _Split:
    """A dimension and the lengths of its pieces, one for each member."""

    dim: int
    sizes: tuple[int, ...]


def _all_to_all_once(x: Tensor, comm: Comm, axis: Axis, *, split: _Split, joined: _Split) -> Tensor:
    own_shape = collectives.with_length(x.shape, split.dim, split.sizes[comm.index(axis)])
    received_shapes = [
        collectives.with_length(own_shape, joined.dim, size) for size in joined.sizes
    ]
    received = comm.all_to_all(
        collectives.pack(x, split.dim, split.sizes),
        axis,
        send_sizes=collectives.piece_numels(x.shape, split.dim, split.sizes),
        recv_sizes=[math.prod(shape) for shape in received_shapes],
    )
    return collectives.unpack(received, received_shapes, joined.dim)


class _AdjointPair(torch.autograd.Function):
    """Autograd node with given functions for forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: TensorFunction, adjoint: TensorFunction) -> Tensor:
        ctx.adjoint = adjoint
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(grads[0]), None, None


def _differentiable(x: Tensor, forward: TensorFunction, adjoint: TensorFunction) -> Tensor:
    return cast(Tensor, _AdjointPair.apply(x, forward, adjoint))  # type: ignore[no-untyped-call]
