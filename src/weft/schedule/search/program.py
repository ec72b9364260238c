"""Integer program of a split-backward table under memory limits (Qi et al. 2023, arXiv 2401.10241), solved by scipy's HiGHS.

Note [Counts instead of orders]
    The micro-batches of a step are equal. So in any table the k-th forward of every stage may be
    taken as that of micro-batch k, and so may the k-th I and W: sorted start times keep every
    dependency, because what holds for each micro-batch holds for the k-th earliest of each stage.
    Hence no variables for the order of pairs of actions are needed. n[kind, stage, t] is the number
    of actions of a kind that a stage has started at time t or before:

        n[F, s, t] <= n[F, s-1, t - F - hop]     arrivals from the stage before; I from the one behind
        n[I, last, t] <= n[F, last, t - F]       the loss
        n[W, s, t] <= n[I, s, t - I]
        sum over kinds, stages of a rank: n[t] - n[t - duration] <= 1      one action at a time
        sum over stages of a rank: n[F, s, t] - n[W, s, t - W] <= limit    activations held

    with 3 x stages x makespan variables. Each program asks whether a table of a given makespan
    exists; a makespan for which HiGHS proves that there is none is a lower bound.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple

from weft.errors import Fault, ScheduleError
from weft.schedule.actions import Act, Kind, Table

KINDS: tuple[Kind, ...] = ("F", "I", "W")
Answer = Literal["none exists", "not known"]


@dataclass(frozen=True)
class SchedulingProblem:
    """A table to be found: sizes, times as whole numbers, memory limits.

    Attributes:
        stage_to_rank: owner of each stage.
        durations: kind -> time of each stage.
        message: time of a message between ranks.
        limits: for each rank the most activations of a stage and micro-batch that it may hold.
    """

    stage_to_rank: tuple[int, ...]
    microbatches: int
    durations: dict[Kind, tuple[int, ...]]
    message: int
    limits: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_to_rank)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.limits)

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages of a rank."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)

    def hop(self, stage: int, other: int) -> int:
        """Time of a message between two stages; 0 on one rank."""
        return 0 if self.stage_to_rank[stage] == self.stage_to_rank[other] else self.message

    def heads(self, kind: Kind) -> list[int]:
        """For each stage the earliest start of an action of this kind."""
        starts: list[int] = [0] * self.num_stages
        forward = self.durations["F"]
        for stage in range(1, self.num_stages):
            arrival = starts[stage - 1] + forward[stage - 1]
            starts[stage] = arrival + self.hop(stage - 1, stage)
        if kind == "F":
            return starts
        last = self.num_stages - 1
        backward = self.durations["I"]
        starts[last] += forward[last]
        for stage in reversed(range(last)):
            arrival = starts[stage + 1] + backward[stage + 1]
            starts[stage] = arrival + self.hop(stage + 1, stage)
        if kind == "W":
            return [start + backward[stage] for stage, start in enumerate(starts)]
        return starts

    def tails(self, kind: Kind) -> list[int]:
        """For each stage the least time from the start of an action of this kind to the end of the
        step.
        """
        rest = list(self.durations["W"])
        if kind == "W":
            return rest
        backward = self.durations["I"]
        for stage in range(self.num_stages):
            rest[stage] += backward[stage]
            if stage > 0:
                behind = rest[stage - 1] + self.hop(stage, stage - 1)
                rest[stage] = max(rest[stage], backward[stage] + behind)
        if kind == "I":
            return rest
        forward = self.durations["F"]
        last = self.num_stages - 1
        rest[last] += forward[last]
        for stage in reversed(range(last)):
            rest[stage] = forward[stage] + self.hop(stage, stage + 1) + rest[stage + 1]
        return rest

    def least_makespan(self) -> int:
        """A lower bound: the work of a rank behind its first arrival, and the round trips that a
        memory limit allows at once.
        """
        heads = self.heads("F")
        ends = self.heads("W")
        tails = self.tails("W")
        least = self.tails("F")[0]
        for rank in range(self.num_ranks):
            stages = self.stages(rank)
            first = min(heads[stage] for stage in stages)
            work = self.microbatches * sum(map(self._work, stages))
            least = max(least, first + work)
            if len(stages) == 1:  # several stages share a limit: none of them is bounded by it
                stage = stages[0]
                round_trip = ends[stage] + tails[stage] - first
                num_rounds = math.ceil(self.microbatches / self.limits[rank])
                least = max(least, first + num_rounds * round_trip)
        return least

    def _work(self, stage: int) -> int:
        """Time of one micro-batch on a stage."""
        times = [self.durations[kind][stage] for kind in KINDS]
        return sum(times)


def solve(
    problem: SchedulingProblem,
    makespan: int,
    *,
    seconds: float,
) -> Table | Answer:
    """A table of at most this makespan, or what is known about it.

    Raises:
        ScheduleError: scipy is not installed.
    """
    program = _CountProgram(problem, makespan)
    if program.is_contradictory:
        return "none exists"
    result = program.solve(seconds)
    if result.x is not None:
        return program.table(result.x)
    return "none exists" if result.status == INFEASIBLE else "not known"


def num_variables(problem: SchedulingProblem, makespan: int) -> int:
    """Size of the program."""
    return len(KINDS) * problem.num_stages * makespan


ANY_GAP = 1e9
"""The first solution is taken. The objective, late forwards, only leads HiGHS to one sooner."""
INFEASIBLE = 2
"""Status of `scipy.optimize.milp` where no solution exists."""


def import_scipy(name: str) -> ModuleType:
    """A module of scipy.

    Raises:
        ScheduleError: it is not installed.
    """
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError:
        what = "the search needs scipy, which is not installed"
        fix = "pip install 'weft-train[plan]'"
        raise ScheduleError(Fault("search", what, fix=fix)) from None


class _Term(NamedTuple):
    """factor x n[kind, stage, time] in a row of the program."""

    factor: int
    kind: Kind
    stage: int
    time: int


@dataclass
class _CountProgram:
    """The program of Note [Counts instead of orders] for one makespan."""

    problem: SchedulingProblem
    makespan: int
    lows: list[int] = field(default_factory=list)
    highs: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kind in KINDS:
            heads = self.problem.heads(kind)
            tails = self.problem.tails(kind)
            for stage in range(self.problem.num_stages):
                duration = self.problem.durations[kind][stage]
                self._add_bounds(heads[stage], self.makespan - tails[stage], duration)

    @property
    def is_contradictory(self) -> bool:
        """Whether some number would have to be above its upper bound."""
        return any(low > high for low, high in zip(self.lows, self.highs, strict=True))

    def solve(self, seconds: float) -> Any:
        """The result of `scipy.optimize.milp`."""
        optimize = import_scipy("optimize")
        sparse = import_scipy("sparse")
        for stage in range(self.problem.num_stages):
            for time in range(self.makespan):
                self._add_dependencies(stage, time)
        for rank in range(self.problem.num_ranks):
            for time in range(self.makespan):
                self._add_capacity(rank, time)
                self._add_memory(rank, time)
        num_columns = len(self.lows)
        num_forward = self.problem.num_stages * self.makespan
        late_forwards = [1] * num_forward + [0] * (num_columns - num_forward)
        shape = (len(self.most), num_columns)
        matrix = sparse.csr_array((self.values, (self.rows, self.columns)), shape=shape)
        return optimize.milp(
            late_forwards,
            integrality=[1] * num_columns,
            bounds=optimize.Bounds(self.lows, self.highs),
            constraints=optimize.LinearConstraint(matrix, ub=self.most),
            options={"time_limit": seconds, "mip_rel_gap": ANY_GAP},
        )

    def table(self, values: Sequence[float]) -> Table:
        """The table of a solution."""
        starts: dict[Act, int] = {}
        for kind in KINDS:
            for stage in range(self.problem.num_stages):
                for mb, time in enumerate(self._start_times(values, kind, stage)):
                    starts[Act(kind, stage, mb)] = time
        rows: list[list[Act]] = [[] for _ in self.problem.limits]
        for act in sorted(starts, key=starts.__getitem__):
            rank = self.problem.stage_to_rank[act.stage]
            rows[rank].append(act)
        return Table.of_rows(
            rows,
            stage_to_rank=self.problem.stage_to_rank,
            microbatches=self.problem.microbatches,
        )

    def _start_times(
        self,
        values: Sequence[float],
        kind: Kind,
        stage: int,
    ) -> Iterator[int]:
        started = 0
        for time in range(self.makespan):
            number = round(values[self._column(kind, stage, time)])
            for _ in range(number - started):
                yield time
            started = number

    def _column(
        self,
        kind: Kind,
        stage: int,
        time: int,
    ) -> int:
        block = KINDS.index(kind) * self.problem.num_stages + stage
        return block * self.makespan + time

    def _add_bounds(
        self,
        first: int,
        last: int,
        duration: int,
    ) -> None:
        """Bounds of the numbers of one kind and stage: starts lie between `first` and `last`, at
        least `duration` apart.
        """
        total = self.problem.microbatches
        for time in range(self.makespan):
            num_possible = (time - first) // duration + 1
            num_later = (last - time - 1) // duration + 1
            num_needed = total - max(num_later, 0)
            low = min(max(num_needed, 0), total)
            high = min(max(num_possible, 0), total)
            self.lows.append(low)
            self.highs.append(high)

    def _add_row(self, terms: Sequence[_Term], most: int) -> None:
        """The sum of the terms is at most `most`; n before time 0 is 0."""
        row = len(self.most)
        for term in terms:
            if term.time < 0:
                continue
            column = self._column(term.kind, term.stage, term.time)
            self.rows.append(row)
            self.columns.append(column)
            self.values.append(term.factor)
        self.most.append(most)

    def _add_at_most(self, number: _Term, other: _Term) -> None:
        """The number is at most the other."""
        self._add_row([number, other._replace(factor=-other.factor)], 0)

    def _add_dependencies(self, stage: int, time: int) -> None:
        """Numbers never fall, and an action starts after those that it needs have ended."""
        forward = _Term(
            1,
            "F",
            stage,
            time,
        )
        input_grad = _Term(
            1,
            "I",
            stage,
            time,
        )
        weight_grad = _Term(
            1,
            "W",
            stage,
            time,
        )
        if time > 0:
            for number in (forward, input_grad, weight_grad):
                before = number._replace(time=time - 1)
                self._add_at_most(before, number)
        if stage > 0:
            self._add_at_most(
                forward,
                self._ended(
                    "F",
                    stage - 1,
                    time,
                    receiver=stage,
                ),
            )
        is_last = stage + 1 == self.problem.num_stages
        if is_last:
            self._add_at_most(
                input_grad,
                self._ended(
                    "F",
                    stage,
                    time,
                    receiver=stage,
                ),
            )
        else:
            self._add_at_most(
                input_grad,
                self._ended(
                    "I",
                    stage + 1,
                    time,
                    receiver=stage,
                ),
            )
        self._add_at_most(
            weight_grad,
            self._ended(
                "I",
                stage,
                time,
                receiver=stage,
            ),
        )

    def _ended(
        self,
        kind: Kind,
        stage: int,
        time: int,
        *,
        receiver: int,
    ) -> _Term:
        """Number of actions whose output has arrived at another stage."""
        duration = self.problem.durations[kind][stage]
        hop = self.problem.hop(stage, receiver)
        return _Term(
            1,
            kind,
            stage,
            time - duration - hop,
        )

    def _add_capacity(self, rank: int, time: int) -> None:
        """A rank runs one action at a time."""
        terms: list[_Term] = []
        for stage in self.problem.stages(rank):
            for kind in KINDS:
                ended = self._ended(
                    kind,
                    stage,
                    time,
                    receiver=stage,
                )
                terms.append(
                    _Term(
                        1,
                        kind,
                        stage,
                        time,
                    )
                )
                terms.append(ended._replace(factor=-1))
        self._add_row(terms, 1)

    def _add_memory(self, rank: int, time: int) -> None:
        """A rank holds at most its limit: a forward takes, the end of a W frees."""
        terms: list[_Term] = []
        for stage in self.problem.stages(rank):
            ended = self._ended(
                "W",
                stage,
                time,
                receiver=stage,
            )
            terms.append(
                _Term(
                    1,
                    "F",
                    stage,
                    time,
                )
            )
            terms.append(ended._replace(factor=-1))
        limit = self.problem.limits[rank]
        self._add_row(terms, limit)
