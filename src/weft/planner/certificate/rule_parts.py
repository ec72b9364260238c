"""What rules of shards share: sums over shards, broadcasts, reductions, and results that a mask asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    is_repeated,
    is_sharded,
    length,
    whole_dim,
    with_dim,
)
from weft.parallel.tensor.traced_op import TracedOp
from weft.planner.certificate.axis_types import AxisType, UntypedError, of_dims


@dataclass(frozen=True)
class TypedOp(TracedOp):
    """A call of an operation along one axis.

    Attributes:
        token_dim: dim of x_BSD that the axis shards where it shards tokens: 0 or 1.
    """

    token_dim: int = 0


ShardRule = Callable[[TypedOp], list[AxisType]]
"""Types of the results along an axis over which no operand is partial or varying."""


def is_summed(*dims: Dim) -> bool:
    """Whether an operation sums over these dims, which belong together, as shards.

    Raises:
        ShardingError: one of them is sharded and another one is not.
    """
    size = max(map(length, dims))
    try:
        return is_sharded(_joined("", dims, size))
    except ShardingError:
        raise ShardingError("a sharded dim is multiplied with a whole one") from None


def broadcast(op: TypedOp, operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Along a dim all operands are sharded or have equal entries, or none is sharded; factors stay
    as they are.

    Raises:
        ShardingError: one is sharded where another one is not.
    """
    dims: list[Dim] = []
    for place in range(-len(shape), 0):
        aligned = [each[place] for each in operands if len(each) >= -place]
        dims.append(_joined(op.name, aligned, shape[place]))
    return tuple(dims)


def _joined(name: str, aligned: Sequence[Dim], size: int) -> Dim:
    """One dim of a result, from those of the operands."""
    longer = [dim for dim in aligned if any(factor.size > 1 or factor.sharded for factor in dim)]
    sizes = {tuple(factor.size for factor in dim) for dim in longer}
    if len(sizes) == 1 and math.prod(next(iter(sizes))) == size:
        factors = zip(*longer, strict=True)
        return tuple(_joined_factor(name, each, size) for each in factors)
    sharded = [dim for dim in longer if is_sharded(dim)]
    whole = [dim for dim in longer if not is_sharded(dim) and not is_repeated(dim)]
    if sharded and whole:
        raise _misfit(name, size)
    return sharded[0] if sharded else (DimFactor(size, repeated=not whole),)


def _joined_factor(name: str, aligned: Sequence[DimFactor], size: int) -> DimFactor:
    sharded = [factor for factor in aligned if factor.sharded]
    is_whole = any(not (each.sharded or each.repeated or each.size == 1) for each in aligned)
    if sharded and is_whole:
        raise _misfit(name, size)
    return sharded[0] if sharded else replace(aligned[0], repeated=not is_whole)


def _misfit(name: str, size: int) -> ShardingError:
    return ShardingError(f"{name} of a sharded dim with a whole one of {size} entries")


def entrywise(op: TypedOp) -> list[AxisType]:
    """Operations on entries."""
    return [of_dims(broadcast(op, op.operands, tuple(out.shape))) for out in op.outputs]


def like_first(op: TypedOp) -> list[AxisType]:
    """Results like the first tensor."""
    return [of_dims(op.dims) for _ in op.outputs]


def check_whole(op: TypedOp, dims: Dims, places: Collection[int]) -> None:
    """Raise ShardingError where one of these dims is sharded."""
    if any(is_sharded(dims[place]) for place in places):
        raise ShardingError(f"{op.name} over a sharded dim")


def apart(op: TypedOp, mixed: Collection[int]) -> list[AxisType]:
    """Results of an operation that mixes entries along some dims, which are whole; along the others
    it treats them apart.

    Args:
        mixed: places of dims of the results.

    Raises:
        UntypedError: tensors of other numbers of dims.
    """
    found = []
    for out in op.outputs:
        for dims in op.operands:
            if len(dims) != out.dim():
                raise UntypedError(f"{op.name} of {len(dims)} dims and {out.dim()}")
            check_whole(op, dims, mixed)
        rows = [_without(dims, mixed) for dims in op.operands]
        dims = broadcast(op, rows, tuple(out.shape))
        for place in mixed:
            dims = with_dim(dims, place, whole_dim(out.shape[place]))
        found.append(of_dims(dims))
    return found


def _without(dims: Dims, mixed: Collection[int]) -> Dims:
    """Dims of one entry in place of those that are mixed: they fit all sizes."""
    for place in mixed:
        dims = with_dim(dims, place, whole_dim(1))
    return dims


def plain_reduction(op: TypedOp, places: Collection[int]) -> list[AxisType]:
    """Results without some dims, which are whole, or with one entry along each."""
    found = []
    for out in op.outputs:
        keeps = out.dim() == len(op.dims)
        dims: list[Dim] = []
        for place, dim in enumerate(op.dims):
            if place not in places:
                dims.append(dim)
            elif keeps:
                dims.append(whole_dim(out.shape[place]))
        found.append(of_dims(tuple(dims)))
    return found


def asked_for(op: TypedOp, results: Sequence[AxisType]) -> list[AxisType]:
    """The results of a backward that its mask asks for: the others are no tensors."""
    mask = op.args.get("output_mask") or (True,) * len(results)
    return [one for one, is_asked in zip(results, mask, strict=True) if is_asked]
