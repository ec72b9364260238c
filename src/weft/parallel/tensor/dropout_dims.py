"""Dims of the tensors of dropout, as the sharding trace sees them, as the shards that random numbers depend on."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.entry_places import WHOLE, DimShard
from weft.models.common.dropout_mode import CallShards
from weft.parallel.tensor.dims import Dim, DimFactor, Dims, ShardingError, is_sharded


def call_shards(dims: Dims, num_sequences: int) -> CallShards:
    """How each dim is sharded; of the first one, what is left of it without sequences.

    Raises:
        ShardingError: a sharded dim is merged with others in another way than side by side.
    """
    first, *others = dims
    return (_shard(_without_sequences(first, num_sequences)), *map(_shard, others))


def _without_sequences(dim: Dim, num_sequences: int) -> Dim:
    """The factors of the first dim behind that of sequences."""
    if not is_sharded(dim):
        return ()
    left = num_sequences
    factors = list(dim)
    while factors and left > 1 and not factors[0].sharded and left % factors[0].size == 0:
        left //= factors.pop(0).size
    if left > 1:
        raise ShardingError("dropout of a tensor whose first dim does not count sequences")
    return tuple(factors)


def _shard(dim: Sequence[DimFactor]) -> DimShard:
    """A dim of several whole factors before the sharded one has as many parts."""
    factors = [factor for factor in dim if factor.size > 1 or factor.sharded]
    if not any(factor.sharded for factor in factors):
        return WHOLE
    *outer, last = factors
    if any(factor.sharded for factor in outer):
        raise ShardingError("dropout of a dim in which a sharded one is not the last")
    num_parts = 1
    for factor in outer:
        num_parts *= factor.size
    if num_parts == 1:
        return DimShard(sharded=True, parts=last.parts)
    if last.parts:
        raise ShardingError("dropout of a dim with parts within parts")
    return DimShard(sharded=True, parts=(last.size,) * num_parts)
