"""Functions of sharded tensors besides elementwise ones: sums, norms, checks, copies, and what has the shape of another.

`sharded_param` makes the parameters of wrappers, so these functions are registered where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.transport import Reduce
from weft.errors import Fault, PlanError
from weft.parallel.autograd.tensor_functions import in_type_of, in_wide_type, take_in_lists
from weft.parallel.zero.shard_entries import ShardEntries, ShardGroup
from weft.parallel.zero.sharded_tensor import (
    SPECIAL,
    ShardedTensor,
    group_of,
    local_of,
    own_entries,
    run_plainly,
    shards_in,
)

TENSOR: Any = Tensor
"""`Tensor`, whose properties type checkers take for values."""


def sharded_param(
    local: Tensor, entries: ShardEntries, group: ShardGroup, *, requires_grad: bool = True
) -> nn.Parameter:
    """A parameter of which `local[n]` are this rank's entries, in the same memory."""
    return nn.Parameter(ShardedTensor.of(local, entries, group), requires_grad=requires_grad)


# sums and norms over all entries


def _sum(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch.sum` over all entries."""
    if len(args) > 1 or set(options) - {"dtype"}:
        return NotImplemented
    (shard,) = args
    total = group_of([shard]).total(torch.sum(in_wide_type(shard.local), **options))
    return total if options else in_type_of(shard, total)


def _mean(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch.mean` over all entries; of a tensor-parallel parameter, those of all its ranks."""
    if len(args) > 1 or options:
        return NotImplemented
    (shard,) = args
    local = in_wide_type(shard.local)
    counted = torch.stack([local.sum(), local.new_tensor(len(local))])
    total, count = group_of([shard]).total(counted).unbind()
    return in_type_of(shard, total / count)


def _norm(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The norm over all entries: `vector_norm(x, ord)`, `x.norm(p)` and their like."""
    shard, *positional = args
    given = dict(zip(("ord", "dim", "keepdim", "dtype"), positional, strict=False))
    given.update({"ord" if key == "p" else key: option for key, option in options.items()})
    order = given.pop("ord", None)
    is_plain = (
        isinstance(shard, ShardedTensor) and given.get("dim") is None and not given.get("keepdim")
    )
    if not is_plain or (order == "nuc") or given.get("out") is not None:
        return NotImplemented
    if order in ("fro", None):
        order = 2.0
    dtype = given.get("dtype")
    local = shard.local if dtype is None else shard.local.to(dtype)
    return _norm_of(group_of([shard]), local, float(order))


def _matrix_norm(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`torch.linalg.norm`, which with an order takes the spectral and other norms of matrices."""
    order = args[1] if len(args) > 1 else options.get("ord")
    has_matrix_norm = order is not None and args[0].ndim > 1
    return NotImplemented if has_matrix_norm else _norm(args, options)


def _norm_of(group: ShardGroup, local: Tensor, order: float) -> Tensor:
    """The norm of the entries of all ranks."""
    if order in (float("inf"), float("-inf")):
        largest = order > 0
        if local.numel():
            partial = local.abs().max() if largest else local.abs().min()
        else:  # the other ranks hold all entries
            partial = local.new_tensor(0.0 if largest else float("inf"))
        op: Reduce = "max" if largest else "min"
        return group.comm.all_reduce(partial.detach(), group.all_axes, op=op)
    if order == 0:
        return group.total((local != 0).sum().to(local.dtype))
    powers = torch.linalg.vector_norm(in_wide_type(local), order).pow(order)
    return in_type_of(local, group.total(powers).pow(1 / order))


def _foreach_norm(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Norms of several tensors: those of Euclidean ones by one all-reduce for each group of ranks."""
    tensors, *rest = args
    order = rest[0] if rest else options.get("ord", 2.0)
    if float(order) != 2.0 or len(rest) > 1 or "dtype" in options:
        return [torch.linalg.vector_norm(tensor, *rest, **options) for tensor in tensors]
    places: dict[ShardGroup, list[int]] = {}
    norms: list[Tensor] = []
    for place, tensor in enumerate(tensors):
        norms.append(torch.linalg.vector_norm(in_wide_type(local_of(tensor))))
        if isinstance(tensor, ShardedTensor):
            places.setdefault(group_of([tensor]), []).append(place)
    for group, members in places.items():
        squares = torch.stack([norms[place] for place in members]).square()
        for place, total in zip(members, group.total(squares).sqrt().unbind(), strict=True):
            norms[place] = total
    return [in_type_of(tensor, norm) for tensor, norm in zip(tensors, norms, strict=True)]


def _check_finite(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What torch.amp.GradScaler calls: all ranks find an entry that is not finite, or none does."""
    gradients, found, scale = args
    run_plainly(
        torch._amp_foreach_non_finite_check_and_unscale_, (gradients, found, scale), options
    )
    # a dict, not a set: every rank starts its collectives in the same order
    groups = dict.fromkeys(group_of([shard]) for shard in shards_in(gradients))
    for group in groups:
        group.comm.all_reduce_(found, group.all_axes, op="max")
    return None


# values


def _copy(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`param.copy_(values)`: of the whole tensor, or sharded alike."""
    target, source, *_ = args
    if not isinstance(target, ShardedTensor):
        return NotImplemented
    if isinstance(source, ShardedTensor) and source.entries != target.entries:
        if source.group is None and target.group is not None:
            _reject_other_shard(source, target)
        source = source.full_tensor()
    if not isinstance(source, ShardedTensor):
        source = own_entries(source, target)
    target.local.copy_(local_of(source))
    return target


def _reject_other_shard(source: ShardedTensor, target: ShardedTensor) -> None:
    got, need = source.entries, target.entries
    fault = Fault(
        "a sharded tensor",
        "was saved by another rank, or on another number of ranks",
        got=f"part {got.index + 1} of {len(got.sizes)} of shape {list(got.shape)}",
        need=f"part {need.index + 1} of {len(need.sizes)} of shape {list(need.shape)}",
        fix="full_state_dict() loads on any number of ranks",
    )
    raise PlanError(fault)


def _like(func: Callable[..., Any]) -> Callable[..., Any]:
    def make(args: Sequence[Any], options: dict[str, Any]) -> Any:
        shard, *rest = args
        if not isinstance(shard, ShardedTensor):
            return NotImplemented
        options.pop("memory_format", None)
        requires_grad = options.pop("requires_grad", False)
        local = run_plainly(func, (shard.local, *rest), options)
        made = ShardedTensor.of(local, shard.entries, shard.group)
        return made.requires_grad_() if requires_grad else made

    return make


def _view_as_real(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Real and imaginary parts, in the same memory: optimizers update complex parameters so."""
    (shard,) = args
    entries = shard.entries
    pairs = ShardEntries(
        (*entries.shape, 2),
        tuple(2 * start for start in entries.starts),
        entries.index,
        None if entries.of_layer is None else (*entries.of_layer, 2),
    )
    return ShardedTensor.of(torch.view_as_real(shard.local).view(-1), pairs, shard.group)


def _view_as_complex(args: Sequence[Any], options: dict[str, Any]) -> Any:
    (shard,) = args
    pairs = shard.entries
    if any(start % 2 for start in pairs.starts):
        return NotImplemented
    entries = ShardEntries(
        pairs.shape[:-1],
        tuple(start // 2 for start in pairs.starts),
        pairs.index,
        None if pairs.of_layer is None else pairs.of_layer[:-1],
    )
    return ShardedTensor.of(torch.view_as_complex(shard.local.view(-1, 2)), entries, shard.group)


def _detach_in_place(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """`gradient.detach_()` of scripts; of a view into flat memory torch rejects it, graph or not."""
    (shard,) = args
    return shard.requires_grad_(False) if shard.is_leaf else NotImplemented


def _get_data(args: Sequence[Any], options: dict[str, Any]) -> Any:
    (shard,) = args
    return shard.detach()  # shares the version counter, so that writes are seen


def _set_data(args: Sequence[Any], options: dict[str, Any]) -> Any:
    shard, values = args
    if not isinstance(values, ShardedTensor):
        values = own_entries(values, shard).clone()
    run_plainly(TENSOR.data.__set__, (shard, local_of(values)), {})


def _get_grad(args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The gradient; autograd has left a plain tensor of this rank's entries where a penalty on the shard was
    differentiated.
    """
    (shard,) = args
    gradient = run_plainly(TENSOR.grad.__get__, args, options)
    if gradient is not None and not isinstance(gradient, ShardedTensor):
        gradient = shard.with_local(gradient)
        run_plainly(TENSOR.grad.__set__, (shard, gradient), {})
    return gradient


def _set_grad(args: Sequence[Any], options: dict[str, Any]) -> Any:
    shard, gradient = args
    if gradient is not None and not isinstance(gradient, ShardedTensor):
        own = own_entries(gradient, shard)
        gradient = ShardedTensor.of(own, shard.entries, shard.group)
    run_plainly(TENSOR.grad.__set__, (shard, gradient), {})


take_in_lists(ShardedTensor)
SPECIAL.update(
    {
        torch.sum: _sum,
        Tensor.sum: _sum,
        torch.mean: _mean,
        Tensor.mean: _mean,
        torch.norm: _norm,
        Tensor.norm: _norm,
        torch.linalg.norm: _matrix_norm,
        torch.linalg.vector_norm: _norm,
        torch._foreach_norm: _foreach_norm,
        torch._amp_foreach_non_finite_check_and_unscale_: _check_finite,
        Tensor.copy_: _copy,
        TENSOR.data.__get__: _get_data,
        TENSOR.data.__set__: _set_data,
        TENSOR.grad.__get__: _get_grad,
        TENSOR.grad.__set__: _set_grad,
        Tensor.detach_: _detach_in_place,
        torch.view_as_real: _view_as_real,
        torch.view_as_complex: _view_as_complex,
        torch.zeros_like: _like(torch.zeros_like),
        torch.ones_like: _like(torch.ones_like),
        torch.empty_like: _like(torch.empty_like),
        torch.full_like: _like(torch.full_like),
    }
)
