"""The groups of ranks that a training step on a mesh uses, in one order for all ranks; a pure function of the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.comm.transport import Communicator
from weft.core.axes import data_axes, state_axes, world_partition
from weft.core.dimension import Dimension, activation_axes, dimensions, token_axes
from weft.core.mesh import Mesh
from weft.core.shard import first_axes

if TYPE_CHECKING:
    from weft.core.model_config import (
        AxisTable,
    )  # its module loads pydantic, which scripts do without

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
# Experts add the group of their own gradients (dp) and ep: 7 for pp, dp, ep, tp, each with members of its own. Totals
# over larger worlds go along groups that exist anyway, see `core.axes.world_partition`.
#
# Kernels of one communicator run one after the other, so under ZeRO 3 an all-gather that is prefetched in the backward
# would wait for the reductions before it. Its reductions have a second communicator over the same ranks (as FSDP2's
# set_separate_reduce_scatter_group makes): dp+cp again, and dp again for experts. Every rank launches on both in one
# order: see Note [One order of gathers and reductions] in parallel/zero/backward_order.py.


@dataclass(frozen=True)
class PlannedGroup:
    """The group of one rank in a partition of the world.

    Attributes:
        axis: mesh axes joined by "+", or "world"; for diagnostics.
        ranks: in mesh order.
        communicator: which of the communicators of these ranks.
    """

    axis: str
    ranks: tuple[int, ...]
    communicator: Communicator = "group"


@dataclass(frozen=True)
class StepGroups:
    """What decides which groups the training steps of a run use, besides the mesh.

    Attributes:
        separates_reductions: whether reductions have a communicator of their own, as under ZeRO 3.
        replicates_expert_params: whether a parameter of the experts is whole on each tp rank.
    """

    separates_reductions: bool = False
    replicates_expert_params: bool = True

    @staticmethod
    def of(*, zero: int, axes: AxisTable) -> StepGroups:
        """Of a ZeRO stage, and of a model with these logical axes of its parameters."""
        expert_axes: set[str] = set()
        tensor_axes: set[str] = set()
        for dimension in dimensions().values():
            if dimension.batch is not None:
                expert_axes.update(dimension.params)
            if dimension.shards_activations:
                tensor_axes.update(dimension.params)
        replicates = False
        for row in axes.values():
            logical_axes = first_axes(row)
            is_of_expert = not expert_axes.isdisjoint(logical_axes)
            if is_of_expert and tensor_axes.isdisjoint(logical_axes):
                replicates = True
        return StepGroups(separates_reductions=zero == 3, replicates_expert_params=replicates)


def planned_groups(
    mesh: Mesh, rank: int, *, steps: StepGroups | None = None
) -> tuple[PlannedGroup, ...]:
    """The groups of `rank`, in the order of Note [Order of the plan]; as many on every rank, and the
    n-th of each rank belong to one partition. () for a mesh of one rank.

    Args:
        steps: the groups of these training steps; None: for programs that call what they like, each
            axis alone has a group too.
    """
    if mesh.size == 1:
        return ()
    world = PlannedGroup("world", tuple(range(mesh.size)))
    groups = [world]
    for axes in _axis_tuples(mesh, steps):
        group = PlannedGroup("+".join(axes), mesh.group(rank, axes))
        groups.append(group)
    if steps is not None and steps.separates_reductions:
        reduced = (data_axes(mesh), _axes_without_experts(mesh))
        for axes in _distinct(state_axes(mesh, axes).sharded for axes in reduced):
            ranks = mesh.group(rank, axes)
            groups.append(PlannedGroup("+".join(axes), ranks, "reductions"))
    return tuple(groups)


def _axis_tuples(mesh: Mesh, steps: StepGroups | None) -> tuple[tuple[str, ...], ...]:
    """Axes taken together: of tokens, and of the gradients of experts, of replicated parameters
    under sequence parallelism, and of both; those of totals; then axes alone. All axes of the mesh
    together are the world.
    """
    wide = mesh.wide_axes
    tokens = data_axes(mesh)
    without_experts = _axes_without_experts(mesh)
    partial = activation_axes()
    found = [tokens, without_experts, _in_mesh_order(mesh, (*tokens, *partial))]
    if steps is None or steps.replicates_expert_params:
        found.append(_in_mesh_order(mesh, (*without_experts, *partial)))
    for summed in list(found):  # of meshes whose states are sharded over a part of these axes
        found.extend(state_axes(mesh, summed))
    found.append(_in_mesh_order(mesh, token_axes()))
    found.extend(world_partition(mesh))
    found.extend(
        (axis,) for axis in wide if steps is None or _has_calls_of_its_own(dimensions()[axis])
    )
    return tuple(axes for axes in _distinct(found) if axes != wide)


def _axes_without_experts(mesh: Mesh) -> tuple[str, ...]:
    """Axes over which the gradients of experts are summed."""
    return tuple(axis for axis in data_axes(mesh) if not dimensions()[axis].params)


def _distinct(found: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Axes that are taken together, each combination once; without the empty one."""
    distinct: list[tuple[str, ...]] = []
    for axes in found:
        if axes and axes not in distinct:
            distinct.append(axes)
    return distinct


def _in_mesh_order(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.wide_axes if axis in axes)


def _has_calls_of_its_own(dimension: Dimension) -> bool:
    """Whether a step calls along this axis alone: between stages, within blocks, between sites."""
    is_within_blocks = bool(dimension.transform)
    return dimension.shards_blocks or is_within_blocks or dimension.local_updates
