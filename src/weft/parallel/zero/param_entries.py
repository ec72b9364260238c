"""Where the entries of a parameter are: boxes of each rank, sums of rows and columns, and its logical matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from weft.core.axes import Box
from weft.core.shard import DimAxis, Stacked

Shape = tuple[int, ...]


def state_shape(shape: Shape, axes: Literal["rows", "columns"]) -> Shape:
    """Shape of the sums of a parameter's rows, [..., A, 1], or columns, [..., 1, B]."""
    if axes == "rows":
        return (*shape[:-1], 1)
    num_columns = shape[-1]
    return (*shape[:-2], 1, num_columns)


@dataclass(frozen=True)
class ParamEntries:
    """Where the entries of one parameter are.

    Attributes:
        shape: of the whole parameter.
        logical: logical axis of each dim.
        axes: mesh axes over whose ranks the entries are spread, each entry on one of them.
        index: of this rank along `axes`.
        boxes_at: rank along `axes` -> boxes of the whole parameter, in the order of its tensor.
        num_holders: ranks along `axes`.
    """

    shape: Shape
    logical: tuple[DimAxis, ...]
    axes: tuple[str, ...]
    index: int
    boxes_at: Callable[[int], tuple[Box, ...]]
    num_holders: int = 1

    @staticmethod
    def whole(shape: Shape, logical: tuple[DimAxis, ...] = ()) -> ParamEntries:
        """A parameter that one rank holds."""
        box = Box.whole(shape)
        return ParamEntries(shape, logical, axes=(), index=0, boxes_at=lambda _: (box,))

    @cached_property
    def own_boxes(self) -> tuple[Box, ...]:
        """The boxes of this rank."""
        return self.boxes_at(self.index)

    def views(self, x: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """This rank's boxes, each with its entries of x, which has a number for each local entry."""
        flat = x.view(-1)
        start = 0
        for box in self.own_boxes:
            stop = start + box.size
            entries = flat[start:stop]
            yield box, entries.view(box.shape)
            start = stop

    def rows(self, x: Tensor) -> Tensor:
        """Partial sum of x along the last dim, [..., A, 1]."""
        shape = state_shape(self.shape, "rows")
        total = x.new_zeros(shape)
        for box, entries in self.views(x):
            *rows, _ = box.slices
            total[tuple(rows)] += entries.sum(-1, keepdim=True)
        return total

    def columns(self, x: Tensor) -> Tensor:
        """Partial sum of x along the last dim but one, [..., 1, B]."""
        shape = state_shape(self.shape, "columns")
        total = x.new_zeros(shape)
        for box, entries in self.views(x):
            *leading, _, columns = box.slices
            place = (*leading, slice(None), columns)
            total[place] += entries.sum(-2, keepdim=True)
        return total

    def spread(self, x: Tensor) -> Tensor:
        """The numbers of x ([..., A, 1], [..., 1, B]) at each local entry, one-dimensional."""
        expanded = x.expand(self.shape)
        parts = [x.new_zeros(0)]
        for box in self.own_boxes:
            entries = expanded[box.slices]
            parts.append(entries.reshape(-1))
        return torch.cat(parts)

    def matrices(self, *, splits_stacked: bool) -> tuple[Box, ...]:
        """The logical matrices of a parameter with two dims or three: each index of the first of
        three dims (experts), and each part of a `Stacked` dim if `splits_stacked`.
        """
        whole = Box.whole(self.shape)
        boxes = [whole]
        if len(self.shape) == 3:
            num_experts = self.shape[0]
            boxes = [_within(whole, 0, index, index + 1) for index in range(num_experts)]
        if not splits_stacked:
            return tuple(boxes)
        for dim, axis in enumerate(self.logical):
            if not isinstance(axis, Stacked):
                continue
            parts: list[Box] = []
            for box in boxes:
                parts.extend(_parts(box, dim, axis))
            boxes = parts
        return tuple(boxes)


def _within(box: Box, dim: int, start: int, stop: int) -> Box:
    """The box with other bounds along one dim."""
    lo = list(box.lo)
    hi = list(box.hi)
    lo[dim] = start
    hi[dim] = stop
    return Box(tuple(lo), tuple(hi))


def _parts(box: Box, dim: int, axis: Stacked) -> Iterator[Box]:
    """The parts of a box along a `Stacked` dim."""
    length = box.hi[dim]
    sizes = axis.sizes(length) or (length,)
    start = 0
    for size in sizes:
        stop = start + size
        yield _within(box, dim, start, stop)
        start = stop
