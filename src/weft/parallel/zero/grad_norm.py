"""Gradient norm and clipping, and the sum of tied parameters' gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.core.dimension import local_update_axes
from weft.parallel.model.parallelize import ParallelModel, ParamShard
from weft.parallel.pp import AXIS as PP
from weft.parallel.zero.fixed_order import exact_sum
from weft.parallel.zero.gradient_reducer import GradientReducer


def sum_tied_gradients(model: ParallelModel, reducer: GradientReducer) -> None:
    """Add the gradients of parameters that several pipeline ranks hold under names of their own;
    all of them get the same sum, added in the order of the ranks.
    """
    comm = model.comm
    here = comm.index(PP)
    sends: list[Work] = []
    terms_of: dict[str, dict[int, Tensor]] = {}
    for tie in model.cross_stage_ties:
        if tie.name not in reducer.sharded_params:
            continue  # this shard has no entry of it, on all of these ranks alike
        own = _gradient(reducer, tie.name)
        terms = terms_of.setdefault(tie.name, {here: own.clone()})
        like = torch.empty_like(own)
        with comm.grouped_messages():
            send = comm.start_send(terms[here], PP, to=tie.peer)
            receiving = comm.start_recv(like, PP, source=tie.peer)
        sends.append(send)
        terms[tie.peer] = receiving.wait()
    for name, terms in terms_of.items():
        first, second, *others = sorted(terms)
        total = _gradient(reducer, name)
        torch.add(terms[first], terms[second], out=total)
        for rank in others:
            total.add_(terms[rank])
    for send in sends:
        send.wait()


def squared_norm(model: ParallelModel, reducer: GradientReducer) -> Tensor:
    """This rank's part of the squared gradient norm, float64 scalar: summed over all ranks, each
    logical parameter counts once.

    A parameter that several ranks hold counts on the first of them; a tied one under its owner's
    name. A gradient that is not finite makes the result not finite, on whatever rank it lies.
    """
    names = tuple(reducer.sharded_params)
    if not names:
        return torch.zeros((), dtype=torch.float64, device=model.comm.device)
    gradients = [_gradient(reducer, name) for name in names]
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch._foreach_norm(gradients, dtype=dtype)
    squares = torch.stack(norms).double().square()
    weights = reducer.norm_weights.get(names)
    if weights is None:
        weights = _count_weights(model, reducer, names)
        reducer.norm_weights[names] = weights
    return (squares * weights).sum()


def exact_squared_norm(model: ParallelModel, reducer: GradientReducer) -> Tensor:
    """The squared gradient norm over all ranks, float64 scalar, the same bits however parameters
    are sharded; every rank must call it.
    """
    gradients: list[Tensor] = []
    for name in reducer.sharded_params:
        axes = reducer.shard_axes[name]
        if is_first_holder(model, name, sharded_over=axes):
            gradients.append(_gradient(reducer, name))

    def squares(gradient: Tensor) -> Tensor:
        return gradient.double().square()

    return exact_sum(model.comm, gradients, squares)


def _count_weights(
    model: ParallelModel,
    reducer: GradientReducer,
    names: tuple[str, ...],
) -> Tensor:
    """1 for each gradient that counts on this rank, else 0; float64 on the device."""
    is_counted = []
    for name in names:
        axes = reducer.shard_axes[name]
        is_counted.append(is_first_holder(model, name, sharded_over=axes))
    return torch.tensor(is_counted, dtype=torch.float64, device=model.comm.device)


def is_first_holder(
    model: ParallelModel,
    name: str,
    *,
    sharded_over: tuple[str, ...] = (),
) -> bool:
    """Whether this rank is the first of those that hold these entries, so that each counts on one
    rank of the mesh; of replicas that train apart, on one rank of each.

    Args:
        sharded_over: mesh axes over which the entries of this rank's part of the parameter are
            sharded further.
    """
    for tie in model.cross_stage_ties:
        if tie.name == name and not tie.is_owner:
            return False
    shard = model.shards[name]
    return _is_first_replica(shard, model.comm, sharded_over)


def _is_first_replica(
    param_shard: ParamShard,
    comm: Comm,
    sharded_over: tuple[str, ...],
) -> bool:
    other_entries = (PP, *param_shard.shard_axes, *sharded_over, *local_update_axes())
    for axis, _ in comm.mesh.axes:
        is_replicated = axis not in other_entries
        if is_replicated and comm.index(axis) > 0:
            return False
    return True


def clip(
    reducer: GradientReducer,
    norm: Tensor,
    *,
    most: float,
    scale: float = 1.0,
) -> None:
    """Scale all gradients so that their global norm is at most `most`; 0 leaves them. As torch's
    clip_grad_norm_.

    Args:
        norm: of the gradients divided by `scale`.
        scale: loss scale by which the gradients are too large; dividing and clipping are one pass.
    """
    if most > 0:
        factor = (most / (norm + 1e-6)).clamp(max=1.0)
    else:
        factor = torch.ones_like(norm)
    if most > 0 or scale != 1:
        reducer.scale(factor / scale)


def _gradient(reducer: GradientReducer, name: str) -> Tensor:
    gradient = reducer.sharded_params[name].grad
    assert gradient is not None, f"{name} has no gradient: it is not in a trained group"
    return gradient
