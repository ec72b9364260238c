"""The groups of ranks that a training step on a mesh uses, in one order for all ranks; a pure function of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from weft.comm.world_stages import world_stages
from weft.core.axes import data_axes
from weft.core.dimension import (
    activation_axes,
    dimensions,
    pipeline_axis,
    position_axes,
    token_axes,
)
from weft.core.mesh import Mesh

# Note [Order of the plan]
# A group is connected when all its members have come to it. Ranks that connect their groups one after the other wait for
# each other in a circle unless all follow one order of all groups. The order: stages of the world, innermost first; then
# groups along axes; then ordered pairs along axes that carry messages, sorted. Groups along the same axes have no rank
# in common, so their order among themselves does not matter; pairs have, so they are sorted by ranks.


@dataclass(frozen=True)
class PlannedGroup:
    """A group of ranks.

    Attributes:
        axis: for messages and diagnostics.
        ranks: in mesh order; of a pair: (source, destination).
        is_pair: whether it carries messages.
    """

    axis: str
    ranks: tuple[int, ...]
    is_pair: bool = False


def planned_groups(mesh: Mesh, rank: int) -> tuple[PlannedGroup, ...]:
    """The groups of `rank`, in the order of Note [Order of the plan]; those of one rank are left
    out, and each set of ranks comes once.
    """
    found: dict[tuple[bool, tuple[int, ...]], PlannedGroup] = {}
    for group in _all_groups(mesh, rank):
        if len(group.ranks) > 1:
            found.setdefault((group.is_pair, group.ranks), group)
    return tuple(found.values())


def _all_groups(mesh: Mesh, rank: int) -> Iterator[PlannedGroup]:
    for stage in world_stages(rank, mesh.size, checked=False):
        yield PlannedGroup(stage.axis, stage.ranks)
    for axes in _axis_tuples(mesh):
        yield PlannedGroup("+".join(axes), mesh.group(rank, axes))
    for axis in mesh.wide_axes:
        if axis == pipeline_axis():
            yield from _pairs(mesh, rank, axis, reach=1)
        elif axis in position_axes():
            yield from _pairs(mesh, rank, axis, reach=mesh.degree(axis) // 2)


def _axis_tuples(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Axes taken together: of tokens, and of the gradients of experts, of replicated parameters
    under sequence parallelism, and of both; then each axis alone.
    """
    wide = mesh.wide_axes
    tokens = data_axes(mesh)
    without_experts = tuple(axis for axis in tokens if not dimensions()[axis].params)
    found = [tokens, without_experts]
    for axes in (tokens, without_experts):
        found.append(tuple(axis for axis in wide if axis in axes or axis in activation_axes()))
    found.append(tuple(axis for axis in wide if axis in token_axes()))
    found.append(wide)
    for axis in wide:
        found.append((axis,))
    return tuple(dict.fromkeys(axes for axes in found if axes))


def _pairs(mesh: Mesh, rank: int, axis: str, *, reach: int) -> list[PlannedGroup]:
    """The ordered pairs of `rank` with ranks at most `reach` places away along `axis`, as on a ring."""
    ranks = mesh.group(rank, (axis,))
    size = len(ranks)
    pairs: set[tuple[int, ...]] = set()
    for place in range(size):
        for distance in range(1, reach + 1):
            other = ranks[(place + distance) % size]
            pairs.update(permutations((ranks[place], other)))
    own = sorted(pair for pair in pairs if rank in pair)
    return [PlannedGroup(axis, pair, is_pair=True) for pair in own]
