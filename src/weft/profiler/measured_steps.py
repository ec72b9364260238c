"""Measured steps of a profile: phases and actions of each rank, and its busy, waiting and communication time by step."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.profiler.matched_calls import BlockedTime, MatchedCalls
from weft.profiler.profile_folder import Profile
from weft.profiler.rank_records import STOP, RankRecords
from weft.schedule.actions import Act

LAST_PHASES = ("reduce", "update", "exchange")
"""Phases with which a step ends; what follows them is no part of it."""


class MeasuredPhase(NamedTuple):
    """A phase of a rank."""

    rank: int
    step: int
    name: str
    start: float
    end: float


class MeasuredAction(NamedTuple):
    """An action of a rank, without the wait for its input.

    Attributes:
        blocked_s: of it, in which calls blocked the rank.
    """

    rank: int
    step: int
    act: Act
    start: float
    end: float
    blocked_s: float

    @property
    def duration(self) -> float:
        """Seconds of the action, with the calls inside it."""
        return self.end - self.start


@dataclass(frozen=True)
class StepAccount:
    """A step of a rank: busy, waiting and communication time are its whole length.

    Attributes:
        start, end: from the read of its batch to the end of its update.
        waiting: by axis, seconds until the last member had started the calls that blocked it.
        communication: by axis, seconds after that.
        waited_for: by rank that started a call last, the seconds of `waiting`.
    """

    rank: int
    step: int
    start: float
    end: float
    waiting: Mapping[str, float]
    communication: Mapping[str, float]
    waited_for: Mapping[int, float]

    @property
    def length(self) -> float:
        """Seconds of the step."""
        return self.end - self.start

    @property
    def waiting_s(self) -> float:
        """Seconds of waiting."""
        return sum(self.waiting.values())

    @property
    def communication_s(self) -> float:
        """Seconds of communication that nothing hid."""
        return sum(self.communication.values())

    @property
    def busy_s(self) -> float:
        """Seconds in which no call blocked the rank."""
        return self.length - self.waiting_s - self.communication_s


@dataclass(frozen=True)
class MeasuredSteps:
    """What the ranks of a profile did, put together; by rank where they are tuples of tuples."""

    mesh: Mesh
    ranks: tuple[RankRecords, ...]
    calls: MatchedCalls

    @staticmethod
    def of(profile: Profile) -> MeasuredSteps:
        """The steps of a profile."""
        return MeasuredSteps(profile.mesh, profile.ranks, MatchedCalls.of(profile.ranks))

    @cached_property
    def phases(self) -> tuple[tuple[MeasuredPhase, ...], ...]:
        """The phases of each rank, one after the other."""
        found = []
        for number, rank in enumerate(self.ranks):
            pairs = zip(rank.phases, rank.phases[1:], strict=False)
            phases = [
                MeasuredPhase(number, each.step, each.name, each.start, after.start)
                for each, after in pairs
                if each.name != STOP
            ]
            found.append(tuple(phases))
        return tuple(found)

    @cached_property
    def accounts(self) -> tuple[tuple[StepAccount, ...], ...]:
        """The whole steps of each rank."""
        return tuple(
            tuple(self._account(phases[0].rank, number, steps) for number, steps in _steps(phases))
            for phases in self.phases
        )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The steps that every rank has whole."""
        common = set.intersection(*({each.step for each in rank} for rank in self.accounts))
        return tuple(sorted(common))

    @cached_property
    def actions(self) -> tuple[tuple[MeasuredAction, ...], ...]:
        """The actions of each rank, one after the other."""
        return tuple(tuple(self._actions_of(number)) for number in range(len(self.ranks)))

    def account(self, rank: int, step: int) -> StepAccount:
        """A step of a rank."""
        return next(each for each in self.accounts[rank] if each.step == step)

    def step_s(self, step: int) -> float:
        """Seconds of a step: from its first begin to its last end on any rank."""
        accounts = [self.account(rank, step) for rank in range(len(self.ranks))]
        return max(each.end for each in accounts) - min(each.start for each in accounts)

    def blocked_between(self, rank: int, start: float, end: float) -> Iterator[BlockedTime]:
        """The times in which calls blocked a rank, as far as they lie in an interval."""
        blocked = self.calls.blocked[rank]
        first = bisect.bisect_right(blocked, start, key=lambda each: each.end)
        for each in blocked[first:]:
            if each.start >= end:
                return
            yield each._replace(start=max(each.start, start), end=min(each.end, end))

    def bubble(self, step: int) -> float | None:
        """Idle share of the pipelines from the first to the last action of each, 0 to 1; None
        without a pipeline.
        """
        axis = pipeline_axis()
        if self.mesh.degree(axis) == 1:
            return None
        rank_s = busy_s = 0.0
        for group in self.mesh.groups(axis):
            actions = [each for rank in group for each in self.actions[rank] if each.step == step]
            first = min(each.start for each in actions)
            last = max(each.end for each in actions)
            rank_s += (last - first) * len(group)
            busy_s += sum(each.duration for each in actions)
        return 1.0 - busy_s / rank_s

    def _account(self, rank: int, step: int, phases: Sequence[MeasuredPhase]) -> StepAccount:
        start, end = phases[0].start, phases[-1].end
        waiting: defaultdict[str, float] = defaultdict(float)
        communication: defaultdict[str, float] = defaultdict(float)
        waited_for: defaultdict[int, float] = defaultdict(float)
        for each in self.blocked_between(rank, start, end):
            communication[each.call.axis] += each.communication
            if each.waiting:
                waiting[each.call.axis] += each.waiting
                waited_for[each.joined.rank] += each.waiting
        return StepAccount(
            rank, step, start, end, dict(waiting), dict(communication), dict(waited_for)
        )

    def _actions_of(self, rank: int) -> Iterator[MeasuredAction]:
        """The actions of a rank, without the wait for the message with its input, which comes first."""
        phases = self.phases[rank]
        for name, start, end in self.ranks[rank].actions:
            place = bisect.bisect_right(phases, start, key=lambda each: each.start) - 1
            input_s = blocked_s = 0.0
            for each in self.blocked_between(rank, start, end):
                if each.call.op == "recv" and _is_of_stages(each):
                    input_s += each.end - each.start
                else:
                    blocked_s += each.end - each.start
            begin = start + input_s
            yield MeasuredAction(rank, phases[place].step, Act.parse(name), begin, end, blocked_s)


def _is_of_stages(blocked: BlockedTime) -> bool:
    """Whether a message is one between stages."""
    return blocked.call.axis == pipeline_axis()


def _steps(phases: Sequence[MeasuredPhase]) -> Iterator[tuple[int, list[MeasuredPhase]]]:
    """The phases of every step that is recorded to its end."""
    of_step: list[MeasuredPhase] = []
    for phase in phases:
        if of_step and phase.step != of_step[0].step and phase.name == "data":
            if of_step[-1].name in LAST_PHASES:
                yield of_step[0].step, of_step
            of_step = []
        is_inside = phase.name in ("data", "forward", *LAST_PHASES)
        if is_inside and (of_step or phase.name == "data") and _goes_on(of_step, phase):
            of_step.append(phase)
    if of_step and of_step[-1].name in LAST_PHASES:
        yield of_step[0].step, of_step


def _goes_on(of_step: Sequence[MeasuredPhase], phase: MeasuredPhase) -> bool:
    """Whether a phase follows those of its step without another one between them."""
    return not of_step or (phase.step == of_step[0].step and phase.start == of_step[-1].end)
