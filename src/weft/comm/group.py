"""`Group`: the ranks along a mesh axis and the channel of their calls, resolved once; groups for totals over all ranks.

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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from weft.comm.device_groups import policy_of
from weft.comm.transport import Call, Channel, Communicator, ConnectsGroups, Transport
from weft.core.dimension import all_axes
from weft.core.mesh import Axis, Mesh, axis_names
from weft.errors import CommError, Fault, MeshError, did_you_mean

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
