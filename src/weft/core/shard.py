"""The shard of a parameter that one rank holds, and fused projections whose parts are sharded separately (`Stacked`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from weft.core.axes import Box, Rule, box_of, boxes_of_range
from weft.core.mesh import Mesh
from weft.errors import Fault, PlanError

T = TypeVar("T")


@dataclass(frozen=True, init=False)
class Stacked:
    """Logical axis of a dim that holds several projections one after the other, each of them
    sharded separately.

    Each part is (logical axis, units): ranks hold whole units, and all parts have the same number
    of entries per unit (the head size, or 1):

        Stacked(("heads", 8), ("kv_heads", 2), ("kv_heads", 2))     q, k, v in one weight; a rank of tp2 holds
                                                                    4 heads of q, then 1 of k, then
                                                                    1 of v
        Stacked(("ffn", 352), ("ffn", 352))                         gate, up in one weight
    """

    parts: tuple[tuple[str, int], ...]

    def __init__(self, *parts: tuple[str, int]) -> None:
        object.__setattr__(self, "parts", parts)

    def __str__(self) -> str:
        return "+".join(axis for axis, _ in self.parts)

    def sizes(self, length: int) -> tuple[int, ...] | None:
        """Entries of each part of a dim of this length; None where the units do not divide it."""
        units_of_parts = [units for _, units in self.parts]
        total = sum(units_of_parts)
        entries_per_unit, rest = divmod(length, total)
        if rest:
            return None
        return tuple(units * entries_per_unit for units in units_of_parts)


DimAxis = str | Stacked
"""Logical axis of one dim of a parameter."""


@dataclass(frozen=True)
class Shard:
    """The entries of a tensor that one rank holds: boxes, which are concatenated along `dim` in the
    local tensor.

    One box, but for a parameter with a `Stacked` dim: one box per part.
    """

    boxes: tuple[Box, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        shapes = [box.shape for box in self.boxes]
        first, *others = shapes
        if not others:
            return first
        length = sum(shape[self.dim] for shape in shapes)
        return _with(first, self.dim, length)

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(box.size for box in self.boxes)

    @property
    def holds_first_entry(self) -> bool:
        """Whether the tensor's very first entry is the first one here."""
        return not any(self.boxes[0].lo)

    def boxes_of_range(self, start: int, stop: int) -> tuple[Box, ...]:
        """Boxes of the whole tensor that entries `start` to `stop` of the local tensor are, in
        row-major order.
        """
        if len(self.boxes) == 1:
            return boxes_of_range(self.boxes[0], start, stop)
        local_tensor = Box.whole(self.shape)
        found: list[Box] = []
        for local in boxes_of_range(local_tensor, start, stop):
            found.extend(self._to_whole(local))
        return tuple(found)

    def _to_whole(self, local: Box) -> Iterator[Box]:
        """A run of local entries as boxes of the whole tensor: split where one part ends and the
        next begins.
        """
        dim = self.dim
        leading = map(range, local.lo[:dim], local.hi[:dim])
        first = local.lo[dim]
        last = local.hi[dim]
        inner_lo = local.lo[dim + 1 :]
        inner_hi = local.hi[dim + 1 :]
        for index in itertools.product(*leading):
            next_index = [place + 1 for place in index]
            part_start = 0
            for part in self.boxes:
                length = part.shape[dim]
                start = max(first - part_start, 0)
                stop = min(last - part_start, length)
                if start < stop:
                    in_part = Box((*index, start, *inner_lo), (*next_index, stop, *inner_hi))
                    yield in_part.shifted(part.lo)
                part_start += length


def sharded_over(axis: DimAxis, rule: Rule) -> str | None:
    """Mesh axis over which a dim with this logical axis is sharded, if any."""
    return rule.get(_first_axis(axis))


def first_axes(axes: tuple[DimAxis, ...]) -> tuple[str, ...]:
    """The axes with each `Stacked` one replaced by that of its first part: all parts are sharded
    over one mesh axis.
    """
    return tuple(map(_first_axis, axes))


def _first_axis(axis: DimAxis) -> str:
    if isinstance(axis, Stacked):
        first_part, _ = axis.parts[0]
        return first_part
    return axis


def shard_of(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[DimAxis, ...],
    *,
    rule: Rule,
    mesh: Mesh,
    rank: int,
) -> Shard:
    """The shard of parameter `name` that `rank` holds.

    Raises:
        PlanError: a `Stacked` dim whose units do not fit the dim's length or do not divide over the
            mesh axis.
    """
    plain_axes = first_axes(axes)
    stacked_dim = _sharded_stacked_dim(name, axes, rule, mesh)
    if stacked_dim is None:
        box = box_of(shape, plain_axes, rule=rule, mesh=mesh, rank=rank)
        return Shard((box,))
    stacked = axes[stacked_dim]
    assert isinstance(stacked, Stacked), f"dim {stacked_dim} was found to be Stacked"
    sizes = _part_sizes(name, stacked, shape[stacked_dim], rule=rule, mesh=mesh)
    boxes: list[Box] = []
    origin = (0,) * len(shape)
    offset = 0
    for (axis, _), size in zip(stacked.parts, sizes, strict=True):
        box = box_of(
            _with(shape, stacked_dim, size),
            _with(plain_axes, stacked_dim, axis),
            rule=rule,
            mesh=mesh,
            rank=rank,
        )
        start = _with(origin, stacked_dim, offset)
        boxes.append(box.shifted(start))
        offset += size
    return Shard(tuple(boxes), stacked_dim)


def _sharded_stacked_dim(
    name: str, axes: tuple[DimAxis, ...], rule: Rule, mesh: Mesh
) -> int | None:
    """The `Stacked` dim that the mesh shards, if any; errors as in `shard_of`."""
    found: list[int] = []
    for dim, axis in enumerate(axes):
        mesh_axis = sharded_over(axis, rule) or ()
        is_sharded = mesh.degree(mesh_axis) > 1
        if isinstance(axis, Stacked) and is_sharded:
            found.append(dim)
    if not found:
        return None
    if len(found) > 1:
        raise PlanError(Fault(name, "two Stacked dims are sharded", need="one at most"))
    return found[0]


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """The tuple with another value at one index."""
    changed = list(values)
    changed[index] = value
    return tuple(changed)


def _part_sizes(
    name: str, stacked: Stacked, length: int, *, rule: Rule, mesh: Mesh
) -> tuple[int, ...]:
    """Entries of each part; errors as in `shard_of`."""
    sizes = stacked.sizes(length)
    if sizes is None:
        total = sum(units for _, units in stacked.parts)
        fault = Fault(
            name,
            f"Stacked units of {stacked} do not fit the dim",
            got=str(length),
            need=f"a multiple of {total}, the units of all parts",
        )
        raise PlanError(fault)
    mesh_axes = {rule.get(axis) for axis, _ in stacked.parts}
    if None in mesh_axes:
        whole = next(axis for axis, _ in stacked.parts if axis not in rule)
        what = f"parts of {stacked} are sharded, and {whole} is whole on this mesh"
        fix = "a degree that divides each part, or one projection for each"
        raise PlanError(Fault(name, what, fix=fix))
    if len(mesh_axes) > 1:
        raise PlanError(Fault(name, f"parts of {stacked} are sharded over different mesh axes"))
    (mesh_axis,) = mesh_axes
    assert mesh_axis is not None, "only sharded dims are asked for"
    degree = mesh.degree(mesh_axis)
    for axis, units in stacked.parts:
        if units % degree:
            fault = Fault(
                name,
                f"part {axis!r} of a Stacked dim does not divide",
                got=f"{units} units",
                need=f"a multiple of {degree}, the ranks along {mesh_axis}",
            )
            raise PlanError(fault)
    return sizes
