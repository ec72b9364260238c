"""Owns the geometry of cut tensors: rules (logical axis -> mesh axis), boxes, and the one gradient rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weft.core.mesh import DATA_AXES, Mesh

Rule = Mapping[str, str]
"""Logical axis of a parameter -> mesh axis that cuts it."""

TENSOR_RULE: Rule = {"heads": "tp", "kv_heads": "tp", "ffn": "tp", "vocab": "tp"}
EXPERT_RULE: Rule = {"experts": "ep"}


@dataclass(frozen=True)
class Box:
    """A piece of a tensor: entries `lo[d] <= index < hi[d]` of every dim."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @staticmethod
    def whole(shape: Iterable[int]) -> Box:
        """The box that is the whole tensor."""
        hi = tuple(shape)
        return Box((0,) * len(hi), hi)

    def __and__(self, other: Box) -> Box:
        """Entries in both boxes; an empty box where they do not meet."""
        lo = tuple(map(max, self.lo, other.lo))
        return Box(lo, tuple(map(max, lo, map(min, self.hi, other.hi))))

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
        return tuple(slice(lo - at, hi - at) for lo, hi, at in zip(self.lo, self.hi, other.lo, strict=True))


def boxes_of_range(box: Box, start: int, stop: int) -> tuple[Box, ...]:
    """Entries `start` to `stop` of a box in row-major order, as few boxes: 2 x dims - 1 at most.

    >>> boxes_of_range(Box((0, 0), (3, 4)), 2, 9)
    (Box(lo=(0, 2), hi=(1, 4)), Box(lo=(1, 0), hi=(2, 4)), Box(lo=(2, 0), hi=(3, 1)))
    """
    if start >= stop:
        return ()
    if not box.lo:
        return (box,)
    inner, first, below = math.prod(box.shape[1:]), box.lo[0], Box(box.lo[1:], box.hi[1:])
    (top, head), (bottom, tail) = divmod(start, inner), divmod(stop, inner)

    def rows(lo: int, hi: int, pieces: tuple[Box, ...]) -> tuple[Box, ...]:
        return tuple(Box((first + lo, *piece.lo), (first + hi, *piece.hi)) for piece in pieces)

    if top == bottom:
        return rows(top, top + 1, boxes_of_range(below, head, tail))
    opening = rows(top, top + 1, boxes_of_range(below, head, inner)) if head else ()
    whole = top + 1 if head else top
    middle = rows(whole, bottom, (below,)) if whole < bottom else ()
    return (*opening, *middle, *rows(bottom, bottom + 1, boxes_of_range(below, 0, tail)))


def span(length: int, parts: int, index: int) -> tuple[int, int]:
    """Bounds of part `index` of `length` entries cut into `parts` whose lengths differ by at most one, longer ones first.

    >>> [span(10, 4, i) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    quotient, remainder = divmod(length, parts)
    lo = index * quotient + min(index, remainder)
    return lo, lo + quotient + (index < remainder)


def span_sizes(length: int, parts: int) -> tuple[int, ...]:
    """Lengths of all parts that `span` cuts."""
    return tuple(hi - lo for lo, hi in (span(length, parts, index) for index in range(parts)))


def sharding_axes(axes: tuple[str, ...], rule: Rule, mesh: Mesh) -> tuple[str, ...]:
    """Mesh axes (of degree > 1) that cut a tensor with these logical axes, in the tensor's dim order."""
    return tuple(rule[axis] for axis in axes if axis in rule and mesh.degree(rule[axis]) > 1)


def box_of(shape: tuple[int, ...], axes: tuple[str, ...], *, rule: Rule, mesh: Mesh, rank: int) -> Box:
    """The piece of a tensor that `rank` holds: every dim whose logical axis is in `rule` is cut over that mesh axis."""
    spans = [
        span(length, mesh.degree(rule[axis]), mesh.index(rank, rule[axis])) if axis in rule else (0, length)
        for length, axis in zip(shape, axes, strict=True)
    ]
    return Box(tuple(lo for lo, _ in spans), tuple(hi for _, hi in spans))


def boxes(shape: tuple[int, ...], axes: tuple[str, ...], *, rule: Rule, mesh: Mesh) -> tuple[Box, ...]:
    """All different pieces of a tensor: together they cover every entry exactly once."""
    cuts = [
        [span(length, parts, index) for index in range(parts)]
        for length, parts in (
            (length, mesh.degree(rule[axis]) if axis in rule else 1) for length, axis in zip(shape, axes, strict=True)
        )
    ]
    pieces = itertools.product(*cuts)
    return tuple(Box(tuple(lo for lo, _ in piece), tuple(hi for _, hi in piece)) for piece in pieces)


def gradient_axes(mesh: Mesh, *, varies: Collection[str], cut: Collection[str]) -> tuple[str, ...]:
    """Mesh axes over which a gradient is summed: those along which its tokens differed, minus those that cut the parameter.

    The one gradient rule: it holds for data, context and expert parallelism, for norms under sequence parallelism and for
    experts alike. `varies` names the axes along which the parameter met different tokens (or different heads).
    """
    return tuple(name for name, degree in mesh.axes if degree > 1 and name in varies and name not in cut)


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Axes of this mesh along which micro-batches differ, in mesh order, degree 1 left out."""
    return tuple(name for name, degree in mesh.axes if degree > 1 and name in DATA_AXES)
