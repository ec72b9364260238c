"""Check of a whole world before a run: members of every group call the same collectives in the same order, and nothing deadlocks.

Note [A world by its roles]
    Ranks are recorded with the real code on the meta device: of every kind of pipeline coordinate
    those at the first and the last place of each other axis, in all combinations (all ranks where
    there are at most 4). A rank in between does what its neighbours at the ends do.

    - Calls: in each kind of action and each phase, the recorded members of a group are compared
      call by call, as at run time: operation, dtype, shape, split sizes, group, and their number.
    - Deadlock: all ranks of a pipeline coordinate run the same actions in the same order, so an
      action is simulated by itself, as if every collective blocked where it is started until all
      members are at it; the phases are simulated with all recorded ranks of the world.
    - Messages between pipeline ranks: the schedule's program is run as if each send and receive
      blocked until its partner is at it (`lower.check_rendezvous`), and dtype and shape of what is
      sent are compared with those of the buffer that receives it.

    Together: actions and messages can be done one by one in the order of the program, and each of
    them ends. Not covered: what happens outside of steps (start, checkpoints, evaluation), code
    that depends on values of tensors, and ranks that die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.comm.observe import Operation
from weft.comm.signature import MemberCall, calls_agree
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.errors import ScheduleError
from weft.layout.plan import Plan
from weft.planner.measure.played_actions import ActionKey, action_keys
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.roles import RoleCosts
from weft.planner.world.call_mismatch import (
    Calls,
    Mismatch,
    call_text,
    mismatches_of,
    rank_text,
    wrong_groups,
)
from weft.planner.world.rank_calls import CallEvent, RankCalls, moved, recorded_coordinates
from weft.planner.world.rendezvous import Blocked, find_deadlock
from weft.schedule.lower import Program, Recv, Send, check_rendezvous

MOST_PROBLEMS = 5
"""Problems that are listed."""
MOST_WAITED = 2
"""Ranks that are listed of those that one waits for."""


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other.

    Attributes:
        region: action or phase, or "the schedule".
        waits: a line for each waiting rank.
    """

    region: str
    waits: tuple[str, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that show the deadlock to a reader."""
        lines = [f"deadlock in {self.region}:"]
        lines.extend(f"  {wait}" for wait in self.waits)
        return tuple(lines)


Problem = Mismatch | Deadlock


@dataclass(frozen=True)
class WorldCheck:
    """Result of the check of a world.

    Attributes:
        num_ranks: of the world.
        num_recorded: ranks that were played.
        num_calls: collectives that were compared, each counted on every recorded rank.
        num_messages: between pipeline ranks, of one copy of the pipeline.
        problems: the first ones.
    """

    num_ranks: int
    num_recorded: int
    num_calls: int
    num_messages: int
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class RecordedWorld:
    """The calls of the ranks that stand for all.

    Attributes:
        ranks: that were played.
        measured_rows: for each pipeline coordinate the one that was played in its place.
        program: the schedule with its messages.
    """

    plan: Plan
    ranks: tuple[RankCalls, ...]
    measured_rows: tuple[int, ...]
    program: Program

    def members(self, row: int) -> list[RankCalls]:
        """The recorded ranks of a pipeline coordinate."""
        return [calls for calls in self.ranks if calls.row == row]


def record_world(
    roles: Sequence[RoleCosts], record_rank: Callable[[int], RankStep]
) -> RecordedWorld:
    """Play the ranks that stand for all; see Note [A world by its roles].

    Args:
        roles: of the run, measured; their ranks are not played again.
        record_rank: plays a world rank with a `CallRecorder`.
    """
    plan = roles[0].step.plan
    mesh = plan.mesh
    recorded: dict[int, RankCalls] = {}
    measured_rows = []
    for role in roles:
        own_rank = role.step.rank
        row = mesh.index(own_rank, pipeline_axis())
        measured_rows.append(row)
        if own_rank in recorded:
            continue
        recorded[own_rank] = RankCalls.of(role.step)
        for coordinates in recorded_coordinates(mesh):
            rank = mesh.rank(**coordinates, **{pipeline_axis(): row})
            if rank not in recorded:
                recorded[rank] = RankCalls.of(record_rank(rank))
    return RecordedWorld(
        plan=plan,
        ranks=tuple(recorded.values()),
        measured_rows=tuple(measured_rows),
        program=plan.program,
    )


def check_recorded(world: RecordedWorld) -> WorldCheck:
    """Compare the calls of recorded ranks."""
    problems: list[Problem] = []
    for row in sorted(set(world.measured_rows)):
        members = world.members(row)
        problems.extend(_action_problems(world.plan, members))
    problems.extend(_phase_problems(world))
    problems.extend(_message_problems(world))
    num_messages = 0
    for instructions in world.program.rows:
        num_messages += sum(isinstance(each, Send) for each in instructions)
    return WorldCheck(
        num_ranks=world.plan.mesh.size,
        num_recorded=len(world.ranks),
        num_calls=sum(calls.num_calls for calls in world.ranks),
        num_messages=num_messages,
        problems=tuple(problems[:MOST_PROBLEMS]),
    )


def _action_problems(plan: Plan, members: Sequence[RankCalls]) -> Iterator[Problem]:
    """Problems of the actions of one pipeline coordinate."""
    row = members[0].row
    names: dict[ActionKey, str] = {}
    for act, key in action_keys(plan.table, row).items():
        names.setdefault(key, str(act))
    for key, name in names.items():
        calls = {}
        for member in members:
            calls[member.rank] = member.actions.get(key, ())
        yield from _region_problems(plan.mesh, name, calls)


@dataclass(frozen=True)
class _ShiftedRank:
    """A recorded rank that stands for the rank `shift` further."""

    calls: RankCalls
    shift: int

    @property
    def rank(self) -> int:
        return self.calls.rank + self.shift

    def events(self, mesh: Mesh, phase: str) -> Sequence[CallEvent]:
        events = self.calls.phases.get(phase, ())
        if not self.shift:
            return events
        return moved(events, mesh, self.shift)


def _phase_problems(world: RecordedWorld) -> Iterator[Problem]:
    """Problems of the phases, in which groups span pipeline coordinates."""
    mesh = world.plan.mesh
    ranks: list[_ShiftedRank] = []
    for row, measured_row in enumerate(world.measured_rows):
        shift = _row_rank(mesh, row) - _row_rank(mesh, measured_row)
        ranks.extend(_ShiftedRank(calls, shift) for calls in world.members(measured_row))
    for phase in world.ranks[0].phases:
        calls_of_rank = {}
        for each in ranks:
            calls_of_rank[each.rank] = each.events(mesh, phase)
        yield from _region_problems(mesh, phase, calls_of_rank)


def _row_rank(mesh: Mesh, row: int) -> int:
    """The first rank of a pipeline coordinate."""
    return mesh.rank(**{pipeline_axis(): row})


def _region_problems(mesh: Mesh, region: str, calls: Calls) -> Iterator[Problem]:
    """Mismatches in a region, or a deadlock where there is none."""
    mismatches = [*wrong_groups(mesh, region, calls), *mismatches_of(mesh, region, calls)]
    yield from mismatches
    if mismatches:
        return
    blocked = find_deadlock(calls)
    if blocked:
        waits = [_wait_line(mesh, each) for each in blocked]
        yield Deadlock(region, tuple(waits))


def _wait_line(mesh: Mesh, blocked: Blocked) -> str:
    listed = blocked.waits_for[:MOST_WAITED]
    waited = [rank_text(mesh, rank) for rank in listed]
    others = ", ".join(waited)
    waiting = rank_text(mesh, blocked.rank)
    call = call_text(blocked.op)
    return f"{waiting} is in {call} and waits for {others}"


def _message_problems(world: RecordedWorld) -> Iterator[Problem]:
    """A program of sends and receives that stops, or tensors that differ from their buffers."""
    try:
        check_rendezvous(world.program)
    except ScheduleError as error:
        faults = [str(fault) for fault in error.faults]
        yield Deadlock("the schedule", tuple(faults))
        return
    known: set[tuple[str, str]] = set()
    for message in _messages(world):
        texts = message.texts
        if texts not in known and not message.agrees:
            known.add(texts)
            yield message.mismatch(world.plan.mesh)


@dataclass(frozen=True)
class _Message:
    """A send and its receive, between two pipeline coordinates."""

    instruction: Recv
    rows: tuple[int, int]
    sent: Operation
    received: Operation

    @property
    def texts(self) -> tuple[str, str]:
        return self.sent.signature.text, self.received.signature.text

    @property
    def agrees(self) -> bool:
        """Whether both sides name the same dtype and shape."""
        sender = MemberCall(0, self.sent.signature)
        receiver = MemberCall(1, self.received.signature)
        return calls_agree(sender, receiver)

    def mismatch(self, mesh: Mesh) -> Mismatch:
        sender, receiver = (_row_rank(mesh, row) for row in self.rows)
        return Mismatch(
            axis=pipeline_axis(),
            region=str(self.instruction),
            position=1,
            ranks=(sender, receiver),
            coordinates=(mesh.coord_text(sender), mesh.coord_text(receiver)),
            calls=self.texts,
        )


def _messages(world: RecordedWorld) -> Iterator[_Message]:
    """Messages of the program, one for each pair of kinds of actions."""
    table = world.plan.table
    calls_of = [world.members(row)[0] for row in world.measured_rows]
    keys = [action_keys(table, row) for row in range(table.num_ranks)]
    consumers = {table.source(act): act for act in table.actions}
    for row, instructions in enumerate(world.program.rows):
        known: set[tuple[ActionKey, ActionKey]] = set()
        for instruction in instructions:
            if not isinstance(instruction, Recv):
                continue
            peer = instruction.peer
            consumer = consumers[instruction.act]
            produced = keys[peer][instruction.act]
            used = keys[row][consumer]
            if (produced, used) in known:
                continue
            known.add((produced, used))
            yield _Message(
                instruction,
                rows=(peer, row),
                sent=calls_of[peer].sent[produced],
                received=calls_of[row].received[used],
            )
