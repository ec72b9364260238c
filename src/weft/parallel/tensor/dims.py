"""Dims of a traced tensor as factors, whole or sharded, and how a view regroups them.

A dim is a tuple of factors, slowest first, whose sizes multiply to its local length. A view
regroups factors, so heads are followed from a projection's output through reshapes and transposes:

    q_BS(HK)  ((B),) ((S),) ((H K, sharded),)    unflatten    ((B),) ((S),) ((H, sharded),) ((K),)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

DECLARE_AXES = (
    "declare the axes of its parameters (Stacked for fused ones), or name axes that are not sharded"
)
INFER = "write -1 for the sharded size, such as the number of heads, and no other"


class ShardingError(Exception):
    """An operation does not compute on shards what it computes on whole tensors.

    Attributes:
        fix: what the author of the module may change.
    """

    def __init__(self, message: str, *, fix: str = DECLARE_AXES) -> None:
        super().__init__(message)
        self.fix = fix


@dataclass(frozen=True)
class DimFactor:
    """Part of a dim: `size` local entries, sharded or whole.

    Attributes:
        parts: local sizes of the parts of a `Stacked` dim.
        repeated: whether all entries are equal: they fit a sharded dim as well as a whole one.
    """

    size: int
    sharded: bool = False
    parts: tuple[int, ...] = ()
    repeated: bool = False


Dim = tuple[DimFactor, ...]
Dims = tuple[Dim, ...]


def whole_dim(size: int) -> Dim:
    """A dim of `size` entries that every rank holds."""
    return (DimFactor(size),)


def whole_dims(shape: Iterable[int]) -> Dims:
    """Dims of a tensor without a sharded one."""
    return tuple(map(whole_dim, shape))


def is_sharded(dim: Dim) -> bool:
    """Whether ranks hold different entries along this dim."""
    return any(factor.sharded for factor in dim)


def is_repeated(dim: Dim) -> bool:
    """Whether all entries along this dim are equal."""
    return all(factor.repeated or factor.size == 1 for factor in dim)


def length(dim: Dim) -> int:
    """Local entries along a dim."""
    return math.prod(factor.size for factor in dim)


def order(dim: Dim) -> tuple[Fraction, ...]:
    """Shares of the parts that ranks hold of a sharded dim one after the other; none: one part, or
    a whole dim.
    """
    factors = [factor for factor in dim if factor.size > 1 or factor.sharded]
    last = next((place for place, factor in enumerate(factors) if factor.sharded), 0)
    num_parts = length(tuple(factors[:last]))
    parts = factors[last].parts if is_sharded(dim) else ()
    shares = tuple(Fraction(part, sum(parts)) for part in parts) or (Fraction(1),)
    found = tuple(share / num_parts for share in shares * num_parts)
    return found if is_sharded(dim) and len(found) > 1 else ()


def canonical(factors: Sequence[DimFactor]) -> Dim:
    """A sharded factor absorbs the whole ones after it: a shard of their product is contiguous,
    too.
    """
    merged: list[DimFactor] = []
    for factor in factors:
        absorbs = bool(merged) and not factor.sharded and not factor.parts
        if absorbs:
            merged[-1] = _times(merged[-1], factor.size)
        else:
            merged.append(factor)
    return tuple(merged) or whole_dim(1)


def _times(factor: DimFactor, count: int) -> DimFactor:
    """The factor with so many entries in place of each one."""
    parts = tuple(size * count for size in factor.parts)
    return replace(factor, size=factor.size * count, parts=parts)


def with_dim(dims: Dims, place: int, *new: Dim) -> Dims:
    """The dims with others, or none, in place of one."""
    before = dims[:place]
    after = dims[place + 1 :]
    return (*before, *new, *after)


def regroup(
    dims: Dims, sizes: Sequence[int], *, inferred: int | None, name: str, has_tokens: bool = False
) -> Dims:
    """Dims of a view of these sizes: the factors in order, split where a size ends within one.

    Args:
        has_tokens: whether the first dims are those of tokens: sequences of which a rank has one
            stay apart from their columns, and a first dim of one entry that is new is no unit.
    """
    if _is_same_shape(dims, sizes, inferred):
        return dims[: len(sizes)]
    is_new_first = inferred != 0 and len(dims) > 1 and tuple(sizes) == (1, *map(length, dims))
    if is_new_first and not has_tokens:  # products of one sequence: [H, S, K] to [1, H, S, K]
        return (whole_dim(1), *dims)
    num_kept = 0 if has_tokens else _num_kept(dims, sizes)
    if num_kept:
        later = None if inferred is None or inferred < num_kept else inferred - num_kept
        others = regroup(dims[num_kept:], sizes[num_kept:], inferred=later, name=name)
        return (*dims[:num_kept], *others)
    stream: list[DimFactor] = []
    for dim in dims:
        stream.extend(factor for factor in dim if factor.size > 1 or factor.sharded)
    found: list[Dim] = []
    cut_place = -1
    for place, size in enumerate(sizes):
        taken: list[DimFactor] = []
        remaining = size
        is_batch = has_tokens and place == 0
        while stream and (
            remaining > 1
            or (is_batch and not taken and stream[0].sharded and stream[0].size == 1)
            or (not is_batch and _is_one_unit(stream[0], dims, sizes, place, inferred, name))
        ):
            factor = stream.pop(0)
            if factor.size > remaining:
                if place == inferred and not factor.sharded:
                    cut_place = place
                factor, rest = _split(factor, remaining, name)
                stream.insert(0, rest)
            if remaining % factor.size:
                raise ShardingError(f"{name} regroups entries across the ends of a sharded dim")
            remaining //= factor.size
            taken.append(factor)
            if remaining == 1 and factor.sharded:
                break
        if place == cut_place + 1 > 0 and is_sharded(tuple(taken)):
            raise ShardingError(f"{name} infers another dim than the sharded one", fix=INFER)
        if taken:
            found.append(tuple(taken) if has_tokens else canonical(taken))
        else:
            found.append(whole_dim(size))
    return tuple(found)


def _is_same_shape(dims: Dims, sizes: Sequence[int], inferred: int | None) -> bool:
    """Whether a view drops at most whole dims of one entry from the end; a size that was written as
    -1 may take entries of the sharded dim, unless it is that dim.
    """
    kept, dropped = dims[: len(sizes)], dims[len(sizes) :]
    if tuple(sizes) != tuple(map(length, kept)) or dropped != (whole_dim(1),) * len(dropped):
        return False
    return inferred is None or is_sharded(dims[inferred]) or not any(map(is_sharded, dims))


def _num_kept(dims: Dims, sizes: Sequence[int]) -> int:
    """The first dims, up to one that is sharded, where a view has all their sizes: the dim of one
    sequence before two heads is not taken for a unit of theirs. 0: it has others.
    """
    place = next((place for place, dim in enumerate(dims) if is_sharded(dim)), len(dims))
    kept = dims[: place + 1]
    has_sizes = place < len(dims) and tuple(sizes[: place + 1]) == tuple(map(length, kept))
    return place + 1 if has_sizes else 0


def _is_one_unit(
    factor: DimFactor, dims: Dims, sizes: Sequence[int], place: int, inferred: int | None, name: str
) -> bool:
    """Whether an output dim of size 1 is this rank's only unit (one head), not an inserted dim.

    Raises:
        ShardingError: it and the next dim may be either.
    """
    if sizes[place] != 1 or not factor.sharded:
        return False
    if factor.size == 1:
        return True
    remaining = factor.size
    for following in range(place + 1, len(sizes)):  # entries of the unit, in one dim or several
        if following == inferred or remaining % sizes[following]:
            return False
        remaining //= sizes[following]
        if remaining == 1:
            break
    if remaining > 1:
        return False
    if sizes[place + 1] > 1 or place == inferred:
        return True
    if place < len(dims) and dims[place] == whole_dim(1):
        return False  # it was there before, as that of a sequence of one token
    raise ShardingError(
        f"{name} has two dims of 1, one of which counts the rank's units", fix=INFER
    )


def _split(factor: DimFactor, outer: int, name: str) -> tuple[DimFactor, DimFactor]:
    """A factor as an outer one of this size and the rest."""
    if factor.size % outer:
        raise ShardingError(f"{name} regroups {factor.size} local entries by {outer}")
    inner = factor.size // outer
    if not factor.parts:
        slow = replace(factor, size=outer)
        return slow, DimFactor(inner)
    has_equal_parts = len(set(factor.parts)) == 1
    if has_equal_parts and len(factor.parts) == outer:  # the outer factor counts the parts
        fast = DimFactor(inner, sharded=factor.sharded)
        return DimFactor(outer), fast
    parts: list[int] = []
    for size in factor.parts:
        if size % inner:
            raise ShardingError(f"{name} regroups entries across the parts of a Stacked dim")
        parts.append(size // inner)
    slow = DimFactor(outer, factor.sharded, tuple(parts))
    return slow, DimFactor(inner)
