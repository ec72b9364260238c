"""Geometry of sharded tensors: sharding rules (logical axis -> mesh axis), boxes of entries, and the gradient rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weft.core.dimension import token_axes
from weft.core.mesh import Mesh

Rule = Mapping[str, str]
"""Logical axis of a parameter -> mesh axis that shards it."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: entries `lo[d] <= index < hi[d]` of every dim."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """The box of a whole tensor."""
        hi = tuple(shape)
        return Box((0,) * len(hi), hi)

    def __and__(self, other: Box) -> Box:
        """Entries in both boxes; an empty box where they do not overlap."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, tuple(map(max, lo, hi)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of every dim."""
        return tuple(hi - lo for lo, hi in zip(self.lo, self.hi, strict=True))

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of this box in the whole tensor."""
        return tuple(map(slice, self.lo, self.hi))

    def within(self, other: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds just `other`."""
        bounds = zip(
            self.lo,
            self.hi,
            other.lo,
            strict=True,
        )
        return tuple(slice(lo - origin, hi - origin) for lo, hi, origin in bounds)


def boxes_of_range(
    box: Box,
    start: int,
    stop: int,
) -> tuple[Box, ...]:
    """Entries `start` to `stop` of a box in row-major order, as few boxes: 2 x dims - 1 at most.

    >>> boxes_of_range(Box((0, 0), (3, 4)), 2, 9)
    (Box(lo=(0, 2), hi=(1, 4)), Box(lo=(1, 0), hi=(2, 4)), Box(lo=(2, 0), hi=(3, 1)))
    """
    if start >= stop:
        return ()
    if not box.lo:
        return (box,)
    row = Box(box.lo[1:], box.hi[1:])
    row_size = row.size
    first_row, head = divmod(start, row_size)
    last_row, tail = divmod(stop, row_size)
    if first_row == last_row:
        return _stack(
            box,
            first_row,
            first_row + 1,
            boxes_of_range(row, head, tail),
        )
    found: list[Box] = []
    if head:
        found += _stack(
            box,
            first_row,
            first_row + 1,
            boxes_of_range(row, head, row_size),
        )
        first_row += 1
    if first_row < last_row:
        found += _stack(
            box,
            first_row,
            last_row,
            (row,),
        )
    found += _stack(
        box,
        last_row,
        last_row + 1,
        boxes_of_range(row, 0, tail),
    )
    return tuple(found)


def _stack(
    box: Box,
    lo: int,
    hi: int,
    pieces: tuple[Box, ...],
) -> tuple[Box, ...]:
    """The pieces of one row, over rows `lo` to `hi` of a box."""
    first = box.lo[0]
    return tuple(Box((first + lo, *piece.lo), (first + hi, *piece.hi)) for piece in pieces)


def span(
    length: int,
    parts: int,
    index: int,
) -> tuple[int, int]:
    """Bounds of part `index` of `length` entries in `parts` parts whose lengths differ by at most one, longer ones first.

    >>> [span(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    quotient, remainder = divmod(length, parts)
    lo = index * quotient + min(index, remainder)
    size = quotient + 1 if index < remainder else quotient
    return lo, lo + size


def span_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Lengths of all parts of `span`."""
    spans = [span(length, parts, index) for index in range(parts)]
    return tuple(hi - lo for lo, hi in spans)


def sharding_axes(
    axes: tuple[str, ...],
    rule: Rule,
    mesh: Mesh,
) -> tuple[str, ...]:
    """Mesh axes (of degree > 1) that shard a tensor with these logical axes, in the tensor's dim order."""
    mesh_axes = [rule[axis] for axis in axes if axis in rule]
    return tuple(axis for axis in mesh_axes if mesh.degree(axis) > 1)


def box_of(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    rule: Rule,
    mesh: Mesh,
    rank: int,
) -> Box:
    """The shard of a tensor that `rank` holds: each dim whose logical axis is in `rule` is sharded over that mesh axis."""
    lo: list[int] = []
    hi: list[int] = []
    for length, axis in zip(shape, axes, strict=True):
        start, stop = 0, length
        if axis in rule:
            mesh_axis = rule[axis]
            start, stop = span(length, mesh.degree(mesh_axis), mesh.index(rank, mesh_axis))
        lo.append(start)
        hi.append(stop)
    return Box(tuple(lo), tuple(hi))


def boxes(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    rule: Rule,
    mesh: Mesh,
) -> tuple[Box, ...]:
    """All different shards of a tensor: together they cover every entry exactly once."""
    spans_of_dims: list[list[tuple[int, int]]] = []
    for length, axis in zip(shape, axes, strict=True):
        parts = mesh.degree(rule[axis]) if axis in rule else 1
        spans_of_dims.append([span(length, parts, index) for index in range(parts)])
    found: list[Box] = []
    for spans in itertools.product(*spans_of_dims):
        lo = tuple(start for start, _ in spans)
        hi = tuple(stop for _, stop in spans)
        found.append(Box(lo, hi))
    return tuple(found)


def gradient_axes(
    mesh: Mesh,
    *,
    varies: Collection[str],
    cut: Collection[str],
) -> tuple[str, ...]:
    """Mesh axes over which a gradient is summed: those along which it varies, minus those that shard the parameter.

    The one gradient rule: it holds for data, context and expert parallelism, for norms under sequence parallelism and for
    experts. `varies` names the axes along which the parameter was applied to different tokens, or different heads.
    """
    return tuple(name for name, degree in mesh.axes if degree > 1 and name in varies and name not in cut)


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes of this mesh along which the tokens of a micro-batch differ, in mesh order, degree 1 left out."""
    differing = token_axes()
    return tuple(name for name, degree in mesh.axes if degree > 1 and name in differing)
