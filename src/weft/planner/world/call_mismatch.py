"""Differences between the calls of members of a group, in one action or phase of a recorded world."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.comm.observe import Operation
from weft.comm.signature import MemberCall, calls_agree
from weft.core.mesh import Mesh
from weft.planner.measure.recorder import Started
from weft.planner.world.rank_calls import CallEvent, group_of

MOST_SHOWN = 8
"""Ranks that are listed of the group that a call should be over."""
MOST_MEMBERS = 4
"""Ranks that are listed of a group."""
Calls = Mapping[int, Sequence[CallEvent]]
"""World rank -> its calls in an action or phase."""


@dataclass(frozen=True)
class Mismatch:
    """Two members of a group that call different things.

    Attributes:
        axis: of the group.
        region: action or phase.
        position: of the call among those of this group in the region, from 1.
        ranks: world ranks.
        coordinates: of both.
        calls: what each of them calls.
    """

    axis: str
    region: str
    position: int
    ranks: tuple[int, int]
    coordinates: tuple[str, str]
    calls: tuple[str, str]

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that show the mismatch to a reader."""
        lines = [f"over {self.axis}, call {self.position} in {self.region} differs:"]
        for member, rank in enumerate(self.ranks):
            place = self.coordinates[member]
            call = self.calls[member]
            lines.append(f"  rank {rank} ({place}): {call}")
        return tuple(lines)


def rank_text(mesh: Mesh, rank: int) -> str:
    """`rank 3 (dp1 tp1)`."""
    coordinates = mesh.coord_text(rank)
    return f"rank {rank} ({coordinates})"


def call_text(op: Operation) -> str:
    """The call of a member, with the first ranks of its group."""
    separator = " -> " if op.is_p2p else " "
    ranks = _ranks_text(op.group[:MOST_MEMBERS], separator)
    if len(op.group) > MOST_MEMBERS:
        ranks = f"{ranks} ..."
    call = op.signature.text or op.op
    return f"{call} over {op.axis}, ranks {ranks}"


def wrong_groups(mesh: Mesh, region: str, calls: Calls) -> Iterator[Mismatch]:
    """Calls over other ranks than those of their axis; the first one of each rank."""
    for rank, events in calls.items():
        found = _wrong_group(mesh, region, rank, events)
        if found is not None:
            yield found


def _wrong_group(
    mesh: Mesh, region: str, rank: int, events: Sequence[CallEvent]
) -> Mismatch | None:
    """The first call of a rank over other ranks than those of its axis."""
    expected: dict[str, tuple[int, ...] | None] = {}
    positions: Counter[str] = Counter()
    for op in _started(events):
        axis = op.axis
        positions[axis] += 1
        if axis not in expected:
            expected[axis] = group_of(mesh, rank, axis)
        group = expected[axis]
        if group is None or _is_group(op, group, rank):
            continue
        others = [member for member in (*group, *op.group) if member != rank]
        other = others[0]
        right = _ranks_text(group[:MOST_SHOWN])
        return Mismatch(
            axis=axis,
            region=region,
            position=positions[axis],
            ranks=(rank, other),
            coordinates=(mesh.coord_text(rank), mesh.coord_text(other)),
            calls=(call_text(op), f"is of the group {right} over {axis}"),
        )
    return None


def _ranks_text(ranks: Sequence[int], separator: str = " ") -> str:
    return separator.join(str(rank) for rank in ranks)


def _is_group(op: Operation, group: tuple[int, ...], rank: int) -> bool:
    if op.is_p2p:
        return rank in op.group and set(op.group) <= set(group)
    return op.group == group


def mismatches_of(mesh: Mesh, region: str, calls: Calls) -> Iterator[Mismatch]:
    """The first difference between two recorded members of each group."""
    for group, of_rank in _by_group(calls).items():
        members: list[_Member] = []
        for rank in group.ranks:
            if rank in calls:
                ops = of_rank.get(rank, [])
                members.append(_Member(rank, ops))
        found = _first_mismatch(mesh, region, group.ranks, members)
        if found is not None:
            yield found


def _first_mismatch(
    mesh: Mesh, region: str, group: tuple[int, ...], members: Sequence[_Member]
) -> Mismatch | None:
    """The first difference to the first member, of the first member that has one."""
    first, *others = members
    for other in others:
        found = _first_difference(mesh, region, group, first, other)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class _MemberGroup:
    """Ranks whose calls are matched in order; of a message its source and destination."""

    is_p2p: bool
    ranks: tuple[int, ...]


def _by_group(calls: Calls) -> dict[_MemberGroup, dict[int, list[Operation]]]:
    """What each rank calls over each group, in order."""
    of_group: dict[_MemberGroup, dict[int, list[Operation]]] = {}
    for rank, events in calls.items():
        for op in _started(events):
            group = _MemberGroup(op.is_p2p, op.group)
            of_rank = of_group.setdefault(group, {})
            ops = of_rank.setdefault(rank, [])
            ops.append(op)
    return of_group


def _started(events: Iterable[CallEvent]) -> Iterator[Operation]:
    for event in events:
        if isinstance(event, Started):
            yield event.op


@dataclass(frozen=True)
class _Member:
    """What a rank calls over a group, in order."""

    rank: int
    ops: Sequence[Operation]

    def call(self, index: int, group: tuple[int, ...]) -> MemberCall:
        return MemberCall(group.index(self.rank), self.ops[index].signature)

    def text(self, index: int) -> str:
        if index < len(self.ops):
            return call_text(self.ops[index])
        return f"makes {len(self.ops)} calls, no other one"


def _first_difference(
    mesh: Mesh, region: str, group: tuple[int, ...], one: _Member, other: _Member
) -> Mismatch | None:
    shorter, longer = sorted((len(one.ops), len(other.ops)))
    index = 0
    while index < shorter and calls_agree(one.call(index, group), other.call(index, group)):
        index += 1
    if index == longer:
        return None
    ops = one.ops if len(one.ops) > index else other.ops
    return Mismatch(
        axis=ops[index].axis,
        region=region,
        position=index + 1,
        ranks=(one.rank, other.rank),
        coordinates=(mesh.coord_text(one.rank), mesh.coord_text(other.rank)),
        calls=(one.text(index), other.text(index)),
    )
