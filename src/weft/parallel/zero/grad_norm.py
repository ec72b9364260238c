"""Between backward and update: sums gradients of tied parameters, computes the global norm, clips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.parallel.model.parallelize import CrossStageTie, ParallelModel, ParamShard


class GradientStore(Protocol):
    """Who keeps the gradients of a rank: `GradientBuckets`, or `ShardedParams` where they are spread or of mixed dtypes."""

    @property
    def sharded_params(self) -> Mapping[str, Tensor]: ...
    @property
    def frozen_shards(self) -> Mapping[str, Tensor]: ...
    @property
    def shard_axes(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def shard_ranges(self) -> Mapping[str, tuple[int, int]]: ...
    def zero_grad(self) -> None: ...
    def set_requires_gradient_sync(self, stage: int) -> None: ...
    def finish(self) -> None: ...
    def scale(self, factor: Tensor | float) -> None: ...
    def after_optimizer_step(self) -> None: ...
    def full_gradients(self) -> dict[str, Tensor]: ...
    def full_parameters(self) -> dict[str, Tensor]: ...


def add_cross_stage_ties(model: ParallelModel, grads: GradientStore) -> None:
    """Add the gradients of parameters that stand on two pipeline ranks under two names; both ranks get the same sum."""
    sends = []
    theirs: list[tuple[CrossStageTie, Tensor]] = []
    for link in model.cross_stage_ties:
        if link.name not in grads.sharded_params:
            continue  # a shard without an entry of it, on both ranks alike
        gradient = _gradient(grads, link.name)
        sends.append(model.comm.start_send(gradient.clone(), "pp", to=link.peer))
        theirs.append((link, model.comm.recv(torch.empty_like(gradient), "pp", source=link.peer)))
    for link, gradient in theirs:
        _gradient(grads, link.name).add_(gradient)
    for send in sends:
        send.wait()


def squared_norm(model: ParallelModel, grads: GradientStore) -> Tensor:
    """This rank's share of the squared gradient norm, float64 scalar: summed over all ranks, each logical parameter counts once.

    A parameter that is whole on several ranks counts on the first of them; a tied one under its owner's name. A gradient that
    is no finite number makes the result none either, on whatever rank it stands.
    """
    names = list(grads.sharded_params)
    if not names:
        return torch.zeros((), dtype=torch.float64, device=model.comm.device)
    gradients = [_gradient(grads, name) for name in names]
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(gradients, dtype=wide)).double()
    counts = [float(counts_here(model, name, spread=grads.shard_axes.get(name, ()))) for name in names]
    return (norms.square() * torch.tensor(counts, dtype=torch.float64, device=norms.device)).sum()


def counts_here(model: ParallelModel, name: str, *, spread: tuple[str, ...] = ()) -> bool:
    """Whether this rank stands first among those that hold these entries, so that each counts on one rank of the mesh.

    `spread` names mesh axes over which the entries of the piece are spread further.
    """
    is_copy = any(link.name == name and not link.is_owner for link in model.cross_stage_ties)
    return not is_copy and _is_first_holder(model.shards[name], model.comm, spread)


def clip(grads: GradientStore, norm: Tensor, *, most: float, scale: float = 1.0) -> None:
    """Scale all gradients so that their global norm is at most `most`; 0 leaves them. As torch's clip_grad_norm_ does.

    They are `scale` times too large and `norm` is their right one: dividing and clipping are one pass.
    """
    factor = (most / (norm + 1e-6)).clamp(max=1.0) if most > 0 else torch.ones_like(norm)
    if most > 0 or scale != 1:
        grads.scale(factor / scale)


def _is_first_holder(piece: ParamShard, comm: Comm, spread: tuple[str, ...]) -> bool:
    """Whether this rank stands first among those that hold the same entries."""
    different = ("pp", *piece.shard_axes, *spread)
    return all(comm.index(axis) == 0 for axis, _ in comm.mesh.axes if axis not in different)


def _gradient(grads: GradientStore, name: str) -> Tensor:
    gradient = grads.sharded_params[name].grad
    assert gradient is not None, f"{name} has no gradient view: make the buckets first"
    return gradient
