"""Geometry of sharded tensors: sharding rules (logical axis -> mesh axis), boxes of entries, and the gradient rule."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.dimension import dimensions, local_update_axes, plain_data_axes, token_axes
from weft.core.mesh import Mesh

Rule = Mapping[str, str]
"""Logical axis of a parameter -> mesh axis that shards it."""

Ints = tuple[int, ...]
Names = tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: entries `lo[d] <= index < hi[d]` of every dim."""

    lo: Ints
    hi: Ints

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """The box of a whole tensor."""
        hi = tuple(shape)
        lo = (0,) * len(hi)
        return Box(lo, hi)

    @staticmethod
    def of_spans(spans: Sequence[tuple[int, int]]) -> Box:
        """The box with these bounds (start, stop) of each dim."""
        lo: list[int] = []
        hi: list[int] = []
        for start, stop in spans:
            lo.append(start)
            hi.append(stop)
        return Box(tuple(lo), tuple(hi))

    def __and__(self, other: Box) -> Box:
        """Entries in both boxes; an empty box where they do not overlap."""
        lo = tuple(map(max, self.lo, other.lo))
        smaller_hi = map(min, self.hi, other.hi)
        hi = tuple(map(max, lo, smaller_hi))
        return Box(lo, hi)

    @property
    def shape(self) -> Ints:
        """Length of every dim."""
        return tuple(map(operator.sub, self.hi, self.lo))

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
        to_origin = tuple(-start for start in other.lo)
        return self.shifted(to_origin).slices

    def shifted(self, offset: Ints) -> Box:
        """The box of the same shape, moved by this number of entries along each dim."""
        lo = tuple(map(operator.add, self.lo, offset))
        hi = tuple(map(operator.add, self.hi, offset))
        return Box(lo, hi)


def boxes_of_range(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """Entries `start` to `stop` of a box in row-major order, as few boxes: 2 x dims - 1 at most.

    >>> boxes_of_range(Box((0, 0), (3, 4)), 2, 9)
    (Box(lo=(0, 2), hi=(1, 4)), Box(lo=(1, 0), hi=(2, 4)), Box(lo=(2, 0), hi=(3, 1)))
    """
    if start >= stop:
        return ()
    if not box.lo:
        return (box,)
    row = Box(box.lo[1:], box.hi[1:])
    first_row, head = divmod(start, row.size)
    last_row, tail = divmod(stop, row.size)
    if first_row == last_row:
        part = boxes_of_range(row, head, tail)
        return _in_rows(box, first_row, first_row + 1, part)
    found: list[Box] = []
    if head:
        end_of_row = boxes_of_range(row, head, row.size)
        found += _in_rows(box, first_row, first_row + 1, end_of_row)
        first_row += 1
    if first_row < last_row:
        found += _in_rows(box, first_row, last_row, (row,))
    start_of_row = boxes_of_range(row, 0, tail)
    found += _in_rows(box, last_row, last_row + 1, start_of_row)
    return tuple(found)


def _in_rows(box: Box, lo: int, hi: int, parts: tuple[Box, ...]) -> tuple[Box, ...]:
    """These parts of one row, in each of the rows `lo` to `hi` of a box."""
    first = box.lo[0]
    found: list[Box] = []
    for part in parts:
        lower = (first + lo, *part.lo)
        upper = (first + hi, *part.hi)
        found.append(Box(lower, upper))
    return tuple(found)


def blocks_of(box: Box, length: int) -> Box:
    """The blocks of `length` entries of a row that a box has entries of, as a box of all blocks.

    >>> blocks_of(Box((2, 3), (4, 9)), 4)
    Box(lo=(2, 0), hi=(4, 3))
    """
    lo = (*box.lo[:-1], box.lo[-1] // length)
    hi = (*box.hi[:-1], -(-box.hi[-1] // length))
    return Box(lo, hi)


def blocks_begun_in(box: Box, length: int) -> Box:
    """Those of which it has the first entry: of boxes that cover a tensor, each block is in one.

    >>> blocks_begun_in(Box((2, 3), (4, 9)), 4)
    Box(lo=(2, 1), hi=(4, 3))
    """
    lo = (*box.lo[:-1], -(-box.lo[-1] // length))
    hi = (*box.hi[:-1], -(-box.hi[-1] // length))
    return Box(lo, hi)


def span(length: int, parts: int, index: int) -> tuple[int, int]:
    """Bounds of part `index` of `length` entries in `parts` parts whose lengths differ by at most
    one, longer ones first.

    >>> [span(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    quotient, remainder = divmod(length, parts)
    num_longer_before = min(index, remainder)
    start = index * quotient + num_longer_before
    size = quotient
    if index < remainder:
        size += 1
    return start, start + size


def span_sizes(length: int, parts: int) -> Ints:
    """Lengths of all parts of `span`."""
    sizes: list[int] = []
    for index in range(parts):
        start, stop = span(length, parts, index)
        sizes.append(stop - start)
    return tuple(sizes)


def sharding_axes(axes: Names, rule: Rule, mesh: Mesh) -> Names:
    """Mesh axes (of degree > 1) that shard a tensor with these logical axes, in the tensor's dim
    order.
    """
    found: list[str] = []
    for axis in axes:
        mesh_axis = rule.get(axis)
        if mesh_axis is None:
            continue
        if mesh.degree(mesh_axis) > 1:
            found.append(mesh_axis)
    return tuple(found)


def box_of(shape: Ints, axes: Names, *, rule: Rule, mesh: Mesh, rank: int) -> Box:
    """The shard of a tensor that `rank` holds: each dim whose logical axis is in `rule` is sharded
    over that mesh axis.
    """
    spans: list[tuple[int, int]] = []
    for length, axis in zip(shape, axes, strict=True):
        mesh_axis = rule.get(axis, ())
        degree = mesh.degree(mesh_axis)
        index = mesh.index(rank, mesh_axis)
        spans.append(span(length, degree, index))
    return Box.of_spans(spans)


def boxes(shape: Ints, axes: Names, *, rule: Rule, mesh: Mesh) -> tuple[Box, ...]:
    """All different shards of a tensor: together they cover every entry exactly once."""
    spans_of_dims: list[list[tuple[int, int]]] = []
    for length, axis in zip(shape, axes, strict=True):
        mesh_axis = rule.get(axis, ())
        degree = mesh.degree(mesh_axis)
        spans = [span(length, degree, index) for index in range(degree)]
        spans_of_dims.append(spans)
    combinations = itertools.product(*spans_of_dims)
    return tuple(map(Box.of_spans, combinations))


def gradient_axes(mesh: Mesh, *, varies: Collection[str], sharded: Collection[str]) -> Names:
    """Mesh axes over which a gradient is summed: those along which it varies, except those that
    shard the parameter.

    The one gradient rule: it holds for data, context and expert parallelism, for norms under
    sequence parallelism and for experts.

    Args:
        varies: axes along which the parameter was applied to different tokens, or different heads.
        sharded: axes that shard the parameter.
    """
    return tuple(name for name in mesh.wide_axes if name in varies and name not in sharded)


def data_axes(mesh: Mesh) -> Names:
    """Axes of this mesh over which the gradients of a step are summed because tokens differ along
    them, in mesh order; without degree 1 and axes of local updates.
    """
    return tuple(
        name for name in mesh.wide_axes if name in token_axes() and name not in local_update_axes()
    )


def world_partition(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Axes whose groups, taken one after the other, reach every rank of the mesh: innermost first,
    so that what is gathered along them is in rank order.

    Neighbouring data axes are taken together, as gradients are.
    """
    summed = data_axes(mesh)
    outermost_first: list[tuple[str, ...]] = []
    run: tuple[str, ...] = ()
    for axis in mesh.wide_axes:
        is_data_axis = axis in summed
        if not is_data_axis or not run:
            run = ()
        run = (*run, axis)
        if len(run) > 1:
            outermost_first.pop()
        outermost_first.append(run)
        if not is_data_axis:
            run = ()
    return tuple(reversed(outermost_first))


def local_update_axis(mesh: Mesh) -> str | None:
    """The axis of this mesh along which replicas train apart, also of degree 1; None without one."""
    for name, _ in mesh.axes:
        if name in local_update_axes():
            return name
    return None


def without_local_updates(mesh: Mesh) -> Mesh:
    """The mesh of one replica: all axes but those of local updates."""
    axes = tuple(each for each in mesh.axes if each[0] not in local_update_axes())
    return Mesh(axes)


class StateAxes(NamedTuple):
    """Axes over which a gradient is summed: those over which ZeRO shards the states, and others along
    which states are copies.
    """

    sharded: Names
    replicated: Names


def state_axes(mesh: Mesh, summed: Names) -> StateAxes:
    """How ZeRO treats the axes over which a gradient is summed: it shards over all of them, but where the
    mesh has an axis that `shards_states`, not over the data axes that shard sequences alone.
    """
    known = dimensions()
    if not any(known[name].shards_states for name in mesh.wide_axes):
        return StateAxes(summed, ())
    copied = {name for name in plain_data_axes() if not known[name].shards_states}
    return StateAxes(
        tuple(name for name in summed if name not in copied),
        tuple(name for name in summed if name in copied),
    )
