"""Groups of ranks: along a mesh axis, resolved once; for totals over all ranks; and all that a training step uses, in one order.

Note [World stages]
    A process group of gloo connects every pair of its members: a group of all ranks would cost each
    of 16,384 ranks 16,383 sockets. The world size is written as a product of factors of at most 16
    (16,384 = 16 * 16 * 16 * 4); the ranks that differ in one digit only form a group of that stage.
    A number that is combined within each stage, from the innermost to the outermost, is combined
    over the world. All ranks combine the same numbers in the same order, so all get the same bits.
    On GPUs the stages of a larger world are the groups along mesh axes, whose communicators exist
    anyway: `core.axes.world_partition`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from weft.comm.backends import policy_of
from weft.comm.transport import Call, Channel, Communicator, ConnectsGroups, Transport
from weft.core.axes import data_axes, state_axes, world_partition
from weft.core.dimension import Dimension, activation_axes, all_axes, dimensions, token_axes
from weft.core.mesh import Axis, Mesh, axis_names
from weft.core.shard import first_axes
from weft.errors import CommError, Fault, MeshError, did_you_mean

if TYPE_CHECKING:
    from weft.core.model_config import (
        AxisTable,
    )  # its module loads pydantic, which scripts do without

MAX_STAGE_RANKS = 16
MAX_NAME_LENGTH = 40
"""Characters; longer lists of members are replaced by a hash in the name of a group."""


@dataclass(frozen=True)
class Group:
    """The ranks along an axis.

    Attributes:
        axis: mesh axis, or several joined by "+".
        ranks: world ranks in mesh order.
        index: this rank's place in `ranks`.
        checked: whether members compare signatures before each call.
        communicator: which of the group's communicators carries its calls.
        transport: carries them; None in a group whose calls are only looked at.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    checked: bool = True
    communicator: Communicator = "group"
    transport: Transport | None = field(default=None, compare=False, repr=False)

    @cached_property
    def channel(self) -> Channel:
        """Where collectives of this group start; found at the first of them, when the groups of a
        plan are connected.
        """
        assert self.transport is not None, "the group of a Comm has a transport"
        if isinstance(self.transport, ConnectsGroups):
            return self.transport.channel(self.axis, self.ranks, communicator=self.communicator)
        return self.transport

    @property
    def degree(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def check_member(self, index: int, what: str) -> None:
        """Raise CommError unless `index` is a place in the group."""
        if not 0 <= index < self.degree:
            raise CommError(f"{what} {index} is outside axis {self.axis!r} of degree {self.degree}")


def axis_group(
    mesh: Mesh,
    rank: int,
    axis: Axis,
    *,
    checked: bool,
    communicator: Communicator = "group",
    transport: Transport | None = None,
) -> Group:
    """The group of `rank` along `axis`; axes of degree 1 are left out of its name.

    Raises:
        MeshError: an axis of an unknown name.
    """
    wanted = axis_names(axis)
    known = all_axes()
    for name in wanted:
        if name not in known:
            fix = did_you_mean(name, known)
            raise MeshError(Fault("axis", f"unknown axis {name!r}", fix=fix))
    present = tuple(name for name, degree in mesh.axes if name in wanted and degree > 1)
    return Group(
        axis="+".join(present or wanted),
        ranks=mesh.group(rank, present),
        index=mesh.index(rank, present),
        checked=checked,
        communicator=communicator,
        transport=transport,
    )


def stage_sizes(world_size: int) -> tuple[int, ...]:
    """Sizes of the stages, innermost first: their product is the world size.

    Each is at most 16, unless the world size has a larger prime factor.
    """
    sizes: list[int] = []
    for factor in _prime_factors(world_size):
        for place, size in enumerate(sizes):
            if size * factor <= MAX_STAGE_RANKS:
                sizes[place] *= factor
                break
        else:
            sizes.append(factor)
    return tuple(sizes)


def _prime_factors(number: int) -> list[int]:
    """Prime factors, largest first."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    if number > 1:
        factors.append(number)
    return sorted(factors, reverse=True)


def world_stages(
    rank: int, world_size: int, *, checked: bool, transport: Transport | None = None
) -> tuple[Group, ...]:
    """The groups of `rank`, one for each stage, innermost first; () for a world of one rank."""
    sizes = stage_sizes(world_size)
    groups = []
    stride = 1
    for stage, size in enumerate(sizes):
        width = size * stride
        index = rank // stride % size
        first = rank - index * stride
        name = "world"
        if len(sizes) > 1:
            name = f"world, stage {stage + 1} of {len(sizes)}"
        group = Group(
            axis=name,
            ranks=tuple(range(first, first + width, stride)),
            index=index,
            checked=checked,
            transport=transport,
        )
        groups.append(group)
        stride = width
    return tuple(groups)


class QueueKey(NamedTuple):
    """Which queue carries a call.

    Attributes:
        kind: of a group of ranks; of its second communicator, for reductions; of an ordered pair,
            for messages; or of the messages of a group, where they travel on its communicator.
        ranks: world ranks of the group or the pair.
    """

    kind: Literal["group", "reductions of group", "pair", "messages of group"]
    ranks: tuple[int, ...]

    @staticmethod
    def of(call: Call) -> QueueKey:
        """The queue of a call."""
        if not call.is_p2p:
            return QueueKey.of_group(call.ranks, call.communicator)
        if policy_of(call.device.type).messages_on_axis_group:
            return QueueKey("messages of group", call.members)
        return QueueKey("pair", call.ranks)

    @staticmethod
    def of_group(ranks: tuple[int, ...], communicator: Communicator) -> QueueKey:
        """The queue of a communicator of a group."""
        if communicator == "reductions":
            return QueueKey("reductions of group", ranks)
        return QueueKey("group", ranks)

    @property
    def name(self) -> str:
        """Name of a queue, the same on all members; of bounded length, since keys of the store begin
        with it.
        """
        members = "-".join(map(str, self.ranks))
        if len(members) <= MAX_NAME_LENGTH:
            return f"{self.kind} {members}"
        digest = hashlib.sha256(members.encode())
        short_digest = digest.hexdigest()[:16]
        size = len(self.ranks)
        first = self.ranks[0]
        return f"{self.kind} of {size} from {first}, {short_digest}"


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
    tuples = _axis_tuples(mesh, steps)
    groups.extend(PlannedGroup("+".join(axes), mesh.group(rank, axes)) for axes in tuples)
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
    return [axes for axes in dict.fromkeys(found) if axes]


def _in_mesh_order(mesh: Mesh, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in mesh.wide_axes if axis in axes)


def _has_calls_of_its_own(dimension: Dimension) -> bool:
    """Whether a step calls along this axis alone: between stages, within blocks, between sites."""
    is_within_blocks = bool(dimension.transform)
    return dimension.shards_blocks or is_within_blocks or dimension.local_updates
