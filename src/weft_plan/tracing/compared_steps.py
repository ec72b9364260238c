"""Measured steps compared with their prediction: bubble, exposed communication, actions that differ, slow ranks."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.profiler.critical_path import CriticalPath, critical_path
from weft.profiler.measured_steps import MeasuredSteps, StepAccount
from weft.profiler.profile_folder import Profile
from weft.prove.losses import StepLosses
from weft.schedule.actions import Table
from weft_plan.tracing.step_prediction import StepPrediction

SLOW_FACTOR = 1.5
"""A rank that works so many times as long at its actions as the others is slow ..."""
SLOW_SHARE = 0.05
"""... if that is more than this share of the step."""


class WorkDifference(NamedTuple):
    """Equal actions of all ranks that run them, or a phase, measured and predicted.

    Attributes:
        name: `B1`, the backward of stage 1; or a phase.
        times: of one of them in a step of a rank.
        measured_s, predicted_s: of one, the mean.
    """

    name: str
    times: float
    measured_s: float
    predicted_s: float

    @property
    def step_s(self) -> float:
        """What a step has more of it than predicted, seconds of a rank."""
        return self.times * (self.measured_s - self.predicted_s)


class SlowRank(NamedTuple):
    """A rank that needs longer for its actions than the others for the same work.

    Attributes:
        factor: how many times as long.
        excess_s: a step, seconds.
        waited_s: what other ranks waited for it a step, all together.
        path_share: of the critical path that it computes on.
    """

    rank: int
    factor: float
    excess_s: float
    waited_s: float
    path_share: float


class AxisExposure(NamedTuple):
    """Time in which calls along an axis blocked a rank, seconds a step: the rank with the most of it.

    Attributes:
        waiting: for ranks that came later.
        communication: after that, in the whole step.
        in_actions: the part of `communication` during actions.
        predicted: of the same, for collectives; None where it is not predicted.
    """

    axis: str
    waiting: float
    communication: float
    in_actions: float
    predicted: float | None


@dataclass(frozen=True)
class Trace:
    """Some steps of a profile beside the prediction of a step.

    Attributes:
        numbers: of the steps, which every rank has whole.
        losses: of the run, beside those of one device, where they were compared.
        drawn: the step that is drawn: of median length.
    """

    profile: Profile
    plan: Plan
    steps: MeasuredSteps
    numbers: tuple[int, ...]
    prediction: StepPrediction
    losses: tuple[StepLosses, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return len(self.steps.ranks)

    @cached_property
    def drawn(self) -> int:
        """The step of median length."""
        ordered = sorted(self.numbers, key=self.steps.step_s)
        return ordered[(len(ordered) - 1) // 2]

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step, the mean."""
        return statistics.fmean(map(self.steps.step_s, self.numbers))

    @cached_property
    def bubble(self) -> float | None:
        """Idle share of the pipeline, the mean; None without a pipeline."""
        found = [self.steps.bubble(number) for number in self.numbers]
        known = [each for each in found if each is not None]
        return statistics.fmean(known) if known else None

    @cached_property
    def paths(self) -> tuple[CriticalPath, ...]:
        """The critical path of each step."""
        return tuple(critical_path(self.steps, number) for number in self.numbers)

    def accounts(self, rank: int) -> list[StepAccount]:
        """The steps of a rank."""
        return [self.steps.account(rank, number) for number in self.numbers]

    def mean(self, rank: int, of: Callable[[StepAccount], float]) -> float:
        """Seconds of a rank, the mean over the steps."""
        return statistics.fmean(map(of, self.accounts(rank)))

    @cached_property
    def waited_for(self) -> tuple[Mapping[int, float], ...]:
        """By rank, the seconds a step that it waited for each other one, the most first."""
        found = []
        for rank in range(self.num_ranks):
            seconds: defaultdict[int, float] = defaultdict(float)
            for account in self.accounts(rank):
                for other, waited in account.waited_for.items():
                    seconds[other] += waited / len(self.numbers)
            found.append(dict(sorted(seconds.items(), key=lambda item: -item[1])))
        return tuple(found)

    @cached_property
    def exposures(self) -> tuple[AxisExposure, ...]:
        """By axis, the one with the most communication first."""
        waiting = self._most(lambda account: account.waiting)
        communication = self._most(lambda account: account.communication)
        in_actions = self._most(self._communication_in_actions)
        predicted = self.prediction.exposed_s
        axes = {*waiting, *communication, *(predicted or {})}
        found = [
            AxisExposure(
                axis,
                waiting.get(axis, 0.0),
                communication.get(axis, 0.0),
                in_actions.get(axis, 0.0),
                None if predicted is None or axis == pipeline_axis() else predicted.get(axis, 0.0),
            )
            for axis in axes
        ]
        return tuple(sorted(found, key=lambda each: (-each.communication, each.axis)))

    def _most(self, of: Callable[[StepAccount], Mapping[str, float]]) -> dict[str, float]:
        """By axis, the mean over the steps of the rank that has the most."""
        most: dict[str, float] = {}
        for rank in range(self.num_ranks):
            total: defaultdict[str, float] = defaultdict(float)
            for account in self.accounts(rank):
                for axis, seconds in of(account).items():
                    total[axis] += seconds / len(self.numbers)
            for axis, seconds in total.items():
                most[axis] = max(most.get(axis, 0.0), seconds)
        return most

    def _communication_in_actions(self, account: StepAccount) -> dict[str, float]:
        seconds: defaultdict[str, float] = defaultdict(float)
        for action in self.steps.actions[account.rank]:
            if action.step == account.step:
                for each in self.steps.blocked_between(account.rank, action.start, action.end):
                    seconds[each.call.axis] += each.communication
        return seconds

    @cached_property
    def differences(self) -> tuple[WorkDifference, ...]:
        """Measured and predicted work, the largest difference of a step first."""
        found = [*self._action_differences(), *self._phase_differences()]
        return tuple(sorted(found, key=lambda each: -abs(each.step_s)))

    def _action_differences(self) -> list[WorkDifference]:
        measured: defaultdict[str, list[float]] = defaultdict(list)
        predicted: defaultdict[str, list[float]] = defaultdict(list)
        for row in self.steps.actions:
            for action in row:
                if action.step in self.numbers:
                    measured[work_name(action.act.kind, action.act.stage)].append(action.duration)
        for act, seconds in self.prediction.action_s.items():
            predicted[work_name(act.kind, act.stage)].append(seconds)
        return [
            WorkDifference(
                name,
                times=len(predicted[name]),
                measured_s=statistics.fmean(seconds),
                predicted_s=statistics.fmean(predicted[name]),
            )
            for name, seconds in measured.items()
        ]

    def _phase_differences(self) -> list[WorkDifference]:
        found = []
        for name in sorted({name for _, name in self.prediction.phase_s} & {"reduce", "update"}):
            predicted = [
                seconds for (_, phase), seconds in self.prediction.phase_s.items() if phase == name
            ]
            measured = [
                phase.end - phase.start
                for phases in self.steps.phases
                for phase in phases
                if phase.name == name and phase.step in self.numbers
            ]
            means = statistics.fmean(measured), statistics.fmean(predicted)
            found.append(WorkDifference(name, 1, *means))
        return found

    @cached_property
    def slow_ranks(self) -> tuple[SlowRank, ...]:
        """Ranks that are slow, the slowest first."""
        seconds = [self._seconds_in_actions(rank) for rank in range(self.num_ranks)]
        expected = [self._expected_s(rank) for rank in range(self.num_ranks)]
        factors = [own / least for own, least in zip(seconds, expected, strict=True)]
        found = []
        for rank, factor in enumerate(factors):
            others = [*factors[:rank], *factors[rank + 1 :]]
            if not others:
                break
            relative = factor / statistics.median_low(others)
            excess_s = seconds[rank] * (1 - 1 / relative)
            if relative >= SLOW_FACTOR and excess_s >= SLOW_SHARE * self.step_s:
                waited_s = sum(each.get(rank, 0.0) for each in self.waited_for)
                share = self.path_share(rank)
                found.append(SlowRank(rank, relative, excess_s, waited_s, share))
        return tuple(sorted(found, key=lambda each: -each.factor))

    def _seconds_in_actions(self, rank: int) -> float:
        """What a rank needs for its actions without calls, the median of the steps."""
        by_step: defaultdict[int, float] = defaultdict(float)
        for action in self.steps.actions[rank]:
            by_step[action.step] += action.duration - action.blocked_s
        return statistics.median(by_step[number] for number in self.numbers)

    def _expected_s(self, rank: int) -> float:
        row = self.plan.table.rows[self.steps.mesh.index(rank, pipeline_axis())]
        return sum(self.prediction.action_s[act] for act in row)

    def path_share(self, rank: int) -> float:
        """Share of the critical paths on which a rank computes, 0 to 1."""
        total = sum(path.length for path in self.paths)
        return sum(path.by_rank.get(rank, 0.0) for path in self.paths) / total


def work_name(kind: str, stage: int) -> str:
    """`B1`: the backward of stage 1."""
    return f"{kind}{stage}"


def whole_steps(steps: MeasuredSteps, table: Table) -> tuple[int, ...]:
    """The steps of which every rank has recorded all actions of its row."""
    counts: Counter[tuple[int, int]] = Counter()
    for rank, row in enumerate(steps.actions):
        counts.update((rank, action.step) for action in row)
    rows = [table.rows[steps.mesh.index(rank, pipeline_axis())] for rank in range(len(steps.ranks))]
    return tuple(
        number
        for number in steps.numbers
        if all(counts[rank, number] == len(row) for rank, row in enumerate(rows))
    )


def fits_plan(profile: Profile, plan: Plan) -> bool:
    """Whether the records are of a run with this plan: its mesh, its actions, its ranks."""
    if profile.mesh != plan.mesh:
        return False
    for number, rank in enumerate(profile.ranks):
        row = plan.table.rows[plan.mesh.index(number, pipeline_axis())]
        known = set(map(str, row))
        if any(action.name not in known for action in rank.actions):
            return False
        if any(not 0 <= each < plan.mesh.size for call in rank.calls for each in call.ranks):
            return False
    return True
