"""What rules of shards share: sums over shards, broadcasts, reductions, and results that a mask asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    is_repeated,
    is_sharded,
    whole_dim,
    with_dim,
)
from weft.parallel.tensor.traced_op import TracedOp, broadcast_dims
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
    sharded = [is_sharded(dim) for dim in dims]
    if any(sharded) and not all(sharded):
        whole = [dim for dim in dims if not is_sharded(dim)]
        if not all(map(is_repeated, whole)):
            raise ShardingError("a sharded dim is multiplied with a whole one")
    return any(sharded)


def broadcast(op: TypedOp, operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Along a dim all operands are sharded or have equal entries, or none is sharded; factors stay
    as they are.
    """
    broadcast_dims(op.name, operands, tuple(shape))  # raises where they do not fit
    dims: list[Dim] = []
    for place in range(-len(shape), 0):
        aligned = [each[place] for each in operands if len(each) >= -place]
        sharded = [dim for dim in aligned if is_sharded(dim)]
        is_whole = any(not is_repeated(dim) for dim in aligned)
        plain = (DimFactor(shape[place], repeated=not is_whole),)
        dims.append(sharded[0] if sharded else plain)
    return tuple(dims)


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
