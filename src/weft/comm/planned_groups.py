"""The groups of ranks that a training step on a mesh uses, in one order for all ranks; a pure function of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from weft.comm.world_stages import stage_sizes, world_stages
from weft.core.axes import data_axes
from weft.core.dimension import activation_axes, dimensions, token_axes
from weft.core.mesh import Mesh

# Note [Order of the plan]
# NCCL makes a communicator when all its members come to it, and splits one from the world's when all ranks of the world
# do. So every rank goes through one list of partitions of the world, in one order, and joins its own group of each: the
# world first, then the stages of the world, then groups along axes. Messages travel on the groups of their axes.


@dataclass(frozen=True)
class PlannedGroup:
    """The group of one rank in a partition of the world.

    Attributes:
        axis: mesh axes joined by "+", or a stage of the world; for diagnostics.
        ranks: in mesh order.
    """

    axis: str
    ranks: tuple[int, ...]


def planned_groups(mesh: Mesh, rank: int) -> tuple[PlannedGroup, ...]:
    """The groups of `rank`, in the order of Note [Order of the plan]; as many on every rank, and the
    n-th of each rank belong to one partition. () for a mesh of one rank.
    """
    if mesh.size == 1:
        return ()
    groups = [PlannedGroup("world", tuple(range(mesh.size)))]
    if len(stage_sizes(mesh.size)) > 1:
        for stage in world_stages(rank, mesh.size, checked=False):
            groups.append(PlannedGroup(stage.axis, stage.ranks))
    for axes in _axis_tuples(mesh):
        groups.append(PlannedGroup("+".join(axes), mesh.group(rank, axes)))
    return tuple(groups)


def _axis_tuples(mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Axes taken together: of tokens, and of the gradients of experts, of replicated parameters
    under sequence parallelism, and of both; then each axis alone. All axes of the mesh together are
    the world.
    """
    wide = mesh.wide_axes
    tokens = data_axes(mesh)
    without_experts = tuple(axis for axis in tokens if not dimensions()[axis].params)
    found = [tokens, without_experts]
    for axes in (tokens, without_experts):
        found.append(tuple(axis for axis in wide if axis in axes or axis in activation_axes()))
    found.append(tuple(axis for axis in wide if axis in token_axes()))
    for axis in wide:
        found.append((axis,))
    return tuple(dict.fromkeys(axes for axes in found if axes and axes != wide))
