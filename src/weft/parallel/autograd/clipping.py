"""Clipping by the norm of a whole model, of whose parameters ranks hold parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis, axis_names
from weft.parallel.autograd.holders import shard_axes_of
from weft.parallel.autograd.rank_part import holders_of_gradient, plain


def total_norm(
    comm: Comm, gradients: Iterable[tuple[Tensor, tuple[str, ...]]], *, over: Axis = ()
) -> Tensor:
    """The norm of gradients over all ranks, float64; a collective.

    Args:
        gradients: each with the mesh axes over which it is sharded.
        over: an axis along which ranks hold other parameters.
    """
    zero = torch.zeros((), dtype=torch.float64, device=comm.device)
    squares_of: dict[tuple[str, ...], Tensor] = {}
    for gradient, axes in gradients:
        squares = gradient.double().square()
        squares_of[axes] = squares_of.get(axes, zero) + squares.sum()
    total = zero
    for axes in sorted(squares_of):
        squares = squares_of[axes]
        total = total + (comm.all_reduce(squares, axes) if axes else squares)
    if axis_names(over):
        total = comm.all_reduce(total, over)
    return total.sqrt()


def clip_to(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm so that it is at most `max_norm`, as torch's clip_grad_norm_."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, comm: Comm) -> Tensor:
    """Scale gradients so that the norm of the whole model's is at most `max_norm`, where tensor-parallel
    layers hold a part of their parameters on each rank, plain or in a `DistributedDataParallel`. A
    collective over the axes of these layers: every rank calls it. torch's `clip_grad_norm_` does the
    same with an all-reduce for each of their parameters.

    Args:
        max_norm: the largest norm that stays as it is.
        comm: that the layers were made with.

    Returns:
        The norm before, float64, equal on these ranks.

    Raises:
        PlanError: the parameters are those of a pipeline, which has a `clip_grad_norm_` of its own.
    """
    gradients: list[tuple[Tensor, tuple[str, ...]]] = []
    for param in parameters:
        gradient = param.grad
        if gradient is None:
            continue
        axes = shard_axes_of(param)
        holders_of_gradient(
            gradient, "weft.clip_grad_norm_ takes the norm of this rank's part alone"
        )
        gradients.append((plain(gradient), axes))
    norm = total_norm(comm, gradients)
    clip_to((gradient for gradient, _ in gradients), norm, max_norm)
    return norm
