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

ROW_ENTRIES = 4096
"""Entries of a row, whose squares are added in float32."""
LARGE_ENTRIES = 2**18
"""Entries of a gradient that is normed in rows. Below that float32 is off by less than 3e-6, and
step costs measured on the meta device are those of the CPU to the byte.
"""


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
        own = gradient_of(reducer, tie.name)
        # A copy is sent: below the sum is written over the gradient, before all peers have received it.
        terms = terms_of.setdefault(tie.name, {here: own.clone()})
        like = torch.empty_like(own)
        with comm.grouped_messages():
            send = comm.start_send(terms[here], PP, to=tie.peer)
            receiving = comm.start_recv(like, PP, source=tie.peer)
        sends.append(send)
        terms[tie.peer] = receiving.wait()
    for name, terms in terms_of.items():
        # In the order of ranks and not of arrival, so that all copies stay the same to the last bit.
        first, second, *others = sorted(terms)
        total = gradient_of(reducer, name)
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
    gradients = [gradient_of(reducer, name) for name in names]
    squares = squares_of(gradients)
    weights = reducer.norm_weights.get(names)
    if weights is None:
        weights = _count_weights(model, reducer, names)
        reducer.norm_weights[names] = weights
    return (squares * weights).sum()


# Note [Norms of large gradients on the CPU]
# The CPU adds the squares of all entries of a float32 tensor one after the other, in a few lanes: the norm of 2^20 entries
# is off by 9e-6, of 2^24 by 5e-4, of 2^26 by 4e-3, and by less on a rank that holds a part of them. So a large gradient is
# normed in rows, in the same time, and the rows are added in float64: 1e-6 at most, whatever the size. GPUs add in a tree.


def squares_of(gradients: list[Tensor]) -> Tensor:
    """The squared norm of each gradient, float64, from sums in float32 at least; see Note [Norms of
    large gradients on the CPU].
    """
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    in_rows = [_is_normed_in_rows(gradient) for gradient in gradients]
    if not any(in_rows):
        return torch.stack(torch._foreach_norm(gradients, dtype=dtype)).double().square()
    small = [
        gradient for gradient, is_large in zip(gradients, in_rows, strict=True) if not is_large
    ]
    norms = iter(torch._foreach_norm(small, dtype=dtype) if small else ())
    squares: list[Tensor] = []
    for gradient, is_large in zip(gradients, in_rows, strict=True):
        if is_large:
            squares.append(_square_in_rows(gradient, dtype))
        else:
            squares.append(next(norms).double().square())
    return torch.stack(squares)


def _is_normed_in_rows(gradient: Tensor) -> bool:
    has_few_digits = gradient.dtype != torch.float64
    return gradient.is_cpu and has_few_digits and gradient.numel() >= LARGE_ENTRIES


def _square_in_rows(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The squared norm, float64 scalar, from norms of rows of `ROW_ENTRIES`."""
    flat = gradient.reshape(-1)
    num_in_rows = flat.numel() // ROW_ENTRIES * ROW_ENTRIES
    rows = flat[:num_in_rows].view(-1, ROW_ENTRIES)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
    whole_rows: Tensor = torch.linalg.vector_norm(norms, dtype=torch.float64)
    rest: Tensor = torch.linalg.vector_norm(flat[num_in_rows:], dtype=torch.float64)
    return whole_rows.square() + rest.square()


def exact_squared_norm(model: ParallelModel, reducer: GradientReducer) -> Tensor:
    """The squared gradient norm over all ranks, float64 scalar, the same bits however parameters
    are sharded; every rank must call it.
    """
    gradients: list[Tensor] = []
    for name in reducer.sharded_params:
        axes = reducer.shard_axes[name]
        if is_first_holder(model, name, sharded_over=axes):
            gradients.append(gradient_of(reducer, name))

    def squares(gradient: Tensor) -> Tensor:
        return gradient.double().square()

    return exact_sum(model.comm, gradients, squares)


def _count_weights(
    model: ParallelModel, reducer: GradientReducer, names: tuple[str, ...]
) -> Tensor:
    """1 for each gradient that counts on this rank, else 0; float64 on the device."""
    is_counted = []
    for name in names:
        axes = reducer.shard_axes[name]
        is_counted.append(is_first_holder(model, name, sharded_over=axes))
    return torch.tensor(is_counted, dtype=torch.float64, device=model.comm.device)


def is_first_holder(model: ParallelModel, name: str, *, sharded_over: tuple[str, ...] = ()) -> bool:
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


def _is_first_replica(param_shard: ParamShard, comm: Comm, sharded_over: tuple[str, ...]) -> bool:
    other_entries = (PP, *param_shard.shard_axes, *sharded_over, *local_update_axes())
    for axis, _ in comm.mesh.axes:
        is_replicated = axis not in other_entries
        if is_replicated and comm.index(axis) > 0:
            return False
    return True


def clip(reducer: GradientReducer, norm: Tensor, *, most: float, scale: float = 1.0) -> None:
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


def gradient_of(reducer: GradientReducer, name: str) -> Tensor:
    """This rank's entries of the gradient of a trained parameter."""
    gradient = reducer.sharded_params[name].grad
    assert gradient is not None, f"{name} has no gradient: it is not in a trained group"
    return gradient
