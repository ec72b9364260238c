"""The groups of ranks that a training step on a mesh uses, in one order for all ranks; a pure function of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.axes import data_axes
from weft.core.dimension import Dimension, activation_axes, dimensions, token_axes
from weft.core.mesh import Mesh

# Note [Order of the plan]
# NCCL makes a communicator when all its members come to it, and splits one from the world's when all ranks of the world
# do. So every rank goes through one list of partitions of the world, in one order, and joins its own group of each: the
# world first, then groups along axes. Messages travel on the groups of their axes.
#
# Note [Communicators of a training run]
# Each communicator holds memory of the GPU, so a training run has those that its steps call, 6 for all of pp, dp, cp, tp:
#
#     world                 the parent of all others; small totals of worlds of at most 16 ranks
#     dp+cp                 gradients, parameters under ZeRO, target counts
#     dp+cp+tp              gradients of parameters that are whole on each tp rank
#     cp, tp, pp            keys and values, activations, messages between stages
#
# Experts add the groups of their own gradients (dp, dp+tp) and ep. Totals over larger worlds go along groups that exist
# anyway, see `world_partition`.


@dataclass(frozen=True)
class PlannedGroup:
    """The group of one rank in a partition of the world.

    Attributes:
        axis: mesh axes joined by "+", or "world"; for diagnostics.
        ranks: in mesh order.
    """

    axis: str
    ranks: tuple[int, ...]


def planned_groups(
    mesh: Mesh,
    rank: int,
    *,
    every_axis: bool = True,
) -> tuple[PlannedGroup, ...]:
    """The groups of `rank`, in the order of Note [Order of the plan]; as many on every rank, and the
    n-th of each rank belong to one partition. () for a mesh of one rank.

    Args:
        every_axis: whether each axis alone has a group, for programs that call what they like; else
            the groups of a training step.
    """
    if mesh.size == 1:
        return ()
    world = PlannedGroup("world", tuple(range(mesh.size)))
    groups = [world]
    for axes in _axis_tuples(mesh, every_axis=every_axis):
        group = PlannedGroup("+".join(axes), mesh.group(rank, axes))
        groups.append(group)
    return tuple(groups)


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


def _axis_tuples(mesh: Mesh, *, every_axis: bool) -> tuple[tuple[str, ...], ...]:
    """Axes taken together: of tokens, and of the gradients of experts, of replicated parameters
    under sequence parallelism, and of both; those of totals; then axes alone. All axes of the mesh
    together are the world.
    """
    wide = mesh.wide_axes
    tokens = data_axes(mesh)
    without_experts = tuple(axis for axis in tokens if not dimensions()[axis].params)
    partial = activation_axes()
    found = [
        tokens,
        without_experts,
        _in_mesh_order(mesh, (*tokens, *partial)),
        _in_mesh_order(mesh, (*without_experts, *partial)),
        _in_mesh_order(mesh, token_axes()),
        *world_partition(mesh),
    ]
    for axis in wide:
        if every_axis or _has_calls_of_its_own(dimensions()[axis]):
            found.append((axis,))
    distinct: list[tuple[str, ...]] = []
    for axes in found:
        if axes and axes != wide and axes not in distinct:
            distinct.append(axes)
    return tuple(distinct)


def _in_mesh_order(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.wide_axes if axis in axes)


def _has_calls_of_its_own(dimension: Dimension) -> bool:
    """Whether a step calls along this axis alone: between stages, within blocks, between sites."""
    is_within_blocks = bool(dimension.transform)
    return dimension.shards_blocks or is_within_blocks or dimension.local_updates
