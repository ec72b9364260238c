"""Owns what happens between backward and update: tied gradients are added, the global norm is taken, gradients are clipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.parallel.dp import GradientBuckets
from weft.parallel.model import FarTie, ParallelModel, Piece


def add_far_ties(model: ParallelModel) -> None:
    """Add the gradients of parameters that stand on two pipeline ranks under two names; both ranks get the same sum."""
    sends = []
    theirs: list[tuple[FarTie, Tensor]] = []
    for link in model.far_ties:
        gradient = _gradient(model, link.name)
        sends.append(model.comm.start_send(gradient.clone(), "pp", to=link.peer))
        theirs.append((link, model.comm.recv(torch.empty_like(gradient), "pp", source=link.peer)))
    for link, gradient in theirs:
        _gradient(model, link.name).add_(gradient)
    for send in sends:
        send.wait()


def squared_norm(model: ParallelModel) -> Tensor:
    """This rank's share of the squared gradient norm, float64 scalar: summed over all ranks, each logical parameter counts once.

    A parameter that is whole on several ranks counts on the first of them; a tied one under its owner's name.
    """
    counted = [
        _gradient(model, name)
        for name, param in model.params.items()
        if param.requires_grad and counts_here(model, name)
    ]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=model.comm.device)
    norms = torch.stack(torch._foreach_norm(counted))
    return norms.double().square().sum()


def counts_here(model: ParallelModel, name: str) -> bool:
    """Whether this rank stands first among those that hold this piece, so that each entry counts on one rank of the mesh."""
    is_copy = any(link.name == name and not link.counts for link in model.far_ties)
    return not is_copy and _is_first_holder(model.pieces[name], model.comm)


def clip(buckets: GradientBuckets, norm: Tensor, *, most: float) -> None:
    """Scale all gradients so that their global norm is at most `most`; 0 leaves them. As torch's clip_grad_norm_ does."""
    if most > 0:
        buckets.scale((most / (norm + 1e-6)).clamp(max=1.0))


def _is_first_holder(piece: Piece, comm: Comm) -> bool:
    """Whether this rank stands first among those that hold the same piece."""
    return all(comm.index(axis) == 0 for axis in _replicating_axes(piece, comm))


def _replicating_axes(piece: Piece, comm: Comm) -> Iterable[str]:
    return (axis for axis, degree in comm.mesh.axes if degree > 1 and axis != "pp" and axis not in piece.cut)


def _gradient(model: ParallelModel, name: str) -> Tensor:
    gradient = model.params[name].grad
    assert gradient is not None, f"{name} has no gradient view: make the buckets first"
    return gradient
