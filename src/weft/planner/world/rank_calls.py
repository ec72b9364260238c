"""Collectives and messages of one rank in a step, by action and phase, and which ranks are recorded for a whole world."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.comm.group import world_stages
from weft.comm.observe import Operation
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.planner.measure.played_actions import ActionKey, action_keys
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.recorder import Ended, RecordedRegion, Started
from weft.schedule.lower import Recv, Send, lower

CallEvent = Started | Ended
Region = ActionKey | str
"""A kind of action, or the name of a phase."""

WORLD = "world"
"""First word of the names of groups of all ranks, see Note [World stages]."""
MOST_RECORDED = 4
"""Ranks of a pipeline coordinate that are all recorded; of more, those at the ends of each axis."""


@dataclass(frozen=True)
class _Messages:
    """Messages between pipeline ranks, by the action that produces and the one that uses the tensor."""

    sent: dict[ActionKey, Operation]
    received: dict[ActionKey, Operation]


@dataclass(frozen=True)
class RankCalls:
    """What a rank calls, in order.

    Attributes:
        rank: world rank.
        row: its pipeline coordinate.
        actions: collectives of each kind of action; their messages between pipeline ranks are in
            `sent` and `received`.
        phases: collectives and messages before and after the actions.
        sent: the message that carries the output of an action, if one does.
        received: the message that carries the input of an action, if one does.
    """

    rank: int
    row: int
    actions: Mapping[ActionKey, tuple[CallEvent, ...]]
    phases: Mapping[str, tuple[CallEvent, ...]]
    sent: Mapping[ActionKey, Operation]
    received: Mapping[ActionKey, Operation]

    @property
    def num_calls(self) -> int:
        """Collectives of one action of each kind and of the phases."""
        total = 0
        for events in (*self.actions.values(), *self.phases.values()):
            total += sum(isinstance(event, Started) for event in events)
        return total

    @staticmethod
    def of(step: RankStep) -> RankCalls:
        """The calls of a recorded step."""
        row = step.plan.mesh.index(step.rank, pipeline_axis())
        messages = _messages(step, row)
        return RankCalls(
            rank=step.rank,
            row=row,
            actions={key: _collectives(region) for key, region in step.actions.items()},
            phases={name: _calls(region) for name, region in step.phases.items()},
            sent=messages.sent,
            received=messages.received,
        )


def _calls(region: RecordedRegion) -> tuple[CallEvent, ...]:
    return tuple(event for event in region.events if isinstance(event, (Started, Ended)))


def _collectives(region: RecordedRegion) -> tuple[CallEvent, ...]:
    """The calls of an action without messages between pipeline ranks."""
    return tuple(event for event in _calls(region) if not _is_pipeline_message(event.op))


def _is_pipeline_message(op: Operation) -> bool:
    return op.is_p2p and op.axis == pipeline_axis()


def _messages(step: RankStep, row: int) -> _Messages:
    """Messages of the recorded actions: they start in the order of the lowered table."""
    table = step.played
    keys = action_keys(table, row)
    consumers = {table.source(act): act for act in table.rows[row]}
    started = _pipeline_messages(step)
    found = _Messages({}, {})
    for instruction in lower(table).rows[row]:
        if isinstance(instruction, Send):
            producer = keys[instruction.act]
            found.sent[producer] = next(started)
        elif isinstance(instruction, Recv):
            consumer = consumers[instruction.act]
            found.received[keys[consumer]] = next(started)
    return found


def _pipeline_messages(step: RankStep) -> Iterator[Operation]:
    """Messages between pipeline ranks outside of the phases, in order."""
    for region in step.regions:
        if region.name in step.phases:
            continue
        for op in region.operations:
            if _is_pipeline_message(op):
                yield op


def recorded_coordinates(mesh: Mesh) -> Iterator[dict[str, int]]:
    """Coordinates, besides the pipeline's, of the ranks that stand for all.

    All of few ranks; else the first and the last place along every axis, in all combinations.
    The first ones are 0 everywhere.
    """
    ranks_a_row = mesh.size // mesh.degree(pipeline_axis())
    are_all_recorded = ranks_a_row <= MOST_RECORDED
    places: dict[str, Sequence[int]] = {}
    for name in mesh.wide_axes:
        if name == pipeline_axis():
            continue
        degree = mesh.degree(name)
        ends = (0, degree - 1)
        places[name] = range(degree) if are_all_recorded else ends
    for indices in itertools.product(*places.values()):
        yield dict(zip(places, indices, strict=True))


def group_of(mesh: Mesh, rank: int, axis: str) -> tuple[int, ...] | None:
    """The group of a rank that operations name `axis`; None for a name that no mesh axis has."""
    if axis.startswith(WORLD):
        for group in world_stages(rank, mesh.size, checked=True):
            if group.axis == axis:
                return group.ranks
        return None
    names = axis.split("+")
    known = {name for name, _ in mesh.axes}
    if not known.issuperset(names):
        return None
    return mesh.group(rank, tuple(names))


def moved(events: tuple[CallEvent, ...], mesh: Mesh, shift: int) -> tuple[CallEvent, ...]:
    """The same calls on the rank that is `shift` further, at another pipeline coordinate."""
    copies: dict[int, Operation] = {}
    result = []
    for event in events:
        identity = id(event.op)
        copy = copies.get(identity)
        if copy is None:
            copy = _moved_operation(event.op, mesh, shift)
            copies[identity] = copy
        result.append(type(event)(copy))
    return tuple(result)


def _moved_operation(op: Operation, mesh: Mesh, shift: int) -> Operation:
    rank = op.rank + shift
    group = tuple(member + shift for member in op.group)
    is_whole_group = not op.is_p2p and op.group == group_of(mesh, op.rank, op.axis)
    if is_whole_group:
        group = group_of(mesh, rank, op.axis) or group
    return replace(op, rank=rank, group=group)
