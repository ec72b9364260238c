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
from weft.schedule.validate_table import SPLIT_BACKWARD

KINDS = SPLIT_BACKWARD
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
        is_local = self.stage_to_rank[stage] == self.stage_to_rank[other]
        return 0 if is_local else self.message

    def heads(self, kind: Kind) -> list[int]:
        """For each stage the earliest start of an action of this kind."""
        starts = self._forward_heads()
        if kind == "F":
            return starts
        last = self.num_stages - 1
        starts[last] += self.durations["F"][last]
        durations = self.durations["I"]
        for stage in reversed(range(last)):
            behind = stage + 1
            arrival = starts[behind] + durations[behind]
            starts[stage] = arrival + self.hop(behind, stage)
        if kind == "I":
            return starts
        return [start + duration for start, duration in zip(starts, durations, strict=True)]

    def _forward_heads(self) -> list[int]:
        durations = self.durations["F"]
        starts = [0] * self.num_stages
        for stage in range(1, self.num_stages):
            before = stage - 1
            arrival = starts[before] + durations[before]
            starts[stage] = arrival + self.hop(before, stage)
        return starts

    def tails(self, kind: Kind) -> list[int]:
        """For each stage the least time from the start of an action of this kind to the end of the
        step.
        """
        if kind == "W":
            return list(self.durations["W"])
        rest = self._backward_tails()
        if kind == "I":
            return rest
        durations = self.durations["F"]
        last = self.num_stages - 1
        rest[last] += durations[last]
        for stage in reversed(range(last)):
            behind = stage + 1
            arrival = durations[stage] + self.hop(stage, behind)
            rest[stage] = arrival + rest[behind]
        return rest

    def _backward_tails(self) -> list[int]:
        durations = self.durations["I"]
        rest = list(self.durations["W"])
        for stage, duration in enumerate(durations):
            rest[stage] += duration
            if stage > 0:
                before = stage - 1
                arrival = duration + self.hop(stage, before)
                rest[stage] = max(rest[stage], arrival + rest[before])
        return rest

    def least_makespan(self) -> int:
        """A lower bound: the work of a rank behind its first arrival, and the round trips that a
        memory limit allows at once.
        """
        heads = self.heads("F")
        least = self.tails("F")[0]
        for rank in range(self.num_ranks):
            stages = self.stages(rank)
            first = min(heads[stage] for stage in stages)
            work = sum(self._work(stage) for stage in stages)
            busy = self.microbatches * work
            least = max(least, first + busy)
            if len(stages) == 1:  # several stages share a limit: none of them is bounded by it
                waits = self._round_trips(rank, stages[0])
                least = max(least, first + waits)
        return least

    def _round_trips(self, rank: int, stage: int) -> int:
        """Time of the only stage of a rank from its first forward to the end of its last backward,
        as its memory limit allows.
        """
        first = self.heads("F")[stage]
        last = self.heads("W")[stage]
        round_trip = last + self.tails("W")[stage] - first
        num_rounds = math.ceil(self.microbatches / self.limits[rank])
        return num_rounds * round_trip

    def _work(self, stage: int) -> int:
        """Time of one micro-batch on a stage."""
        times = [self.durations[kind][stage] for kind in KINDS]
        return sum(times)


def solve(problem: SchedulingProblem, makespan: int, *, seconds: float) -> Table | Answer:
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
    if result.status == INFEASIBLE:
        return "none exists"
    return "not known"


class _Count(NamedTuple):
    """n[kind, stage, time]: actions that have started at a time or before."""

    kind: Kind
    stage: int
    time: int

    def before(self, duration: int) -> _Count:
        """The same a duration earlier."""
        return _Count(self.kind, self.stage, self.time - duration)


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
    """factor x number in a row of the program."""

    factor: int
    number: _Count


@dataclass
class _CountProgram:
    """The program of Note [Counts instead of orders] for one makespan.

    Attributes:
        lows, highs: bounds of each count.
        rows, columns, values: entries of the matrix.
        most: of each row of it.
    """

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
            durations = self.problem.durations[kind]
            for first, tail, duration in zip(heads, tails, durations, strict=True):
                last = self.makespan - tail
                self._add_bounds(first, last, duration)

    @property
    def is_contradictory(self) -> bool:
        """Whether some number would have to be above its upper bound."""
        return any(low > high for low, high in zip(self.lows, self.highs, strict=True))

    def solve(self, seconds: float) -> Any:
        """The result of `scipy.optimize.milp`."""
        optimize = import_scipy("optimize")
        sparse = import_scipy("sparse")
        self._add_rows()
        num_columns = len(self.lows)
        num_forward = self.problem.num_stages * self.makespan
        late_forwards = [1] * num_forward + [0] * (num_columns - num_forward)
        shape = (len(self.most), num_columns)
        entries = (self.values, (self.rows, self.columns))
        matrix = sparse.csr_array(entries, shape=shape)
        return optimize.milp(
            late_forwards,
            integrality=[1] * num_columns,
            bounds=optimize.Bounds(self.lows, self.highs),
            constraints=optimize.LinearConstraint(matrix, ub=self.most),
            options={"time_limit": seconds, "mip_rel_gap": ANY_GAP},
        )

    def table(self, values: Sequence[float]) -> Table:
        """The table of a solution."""
        problem = self.problem
        starts: dict[Act, int] = {}
        for kind in KINDS:
            for stage in range(problem.num_stages):
                times = self._start_times(values, kind, stage)
                for mb, time in enumerate(times):
                    starts[Act(kind, stage, mb)] = time
        rows: list[list[Act]] = [[] for _ in problem.limits]
        for act in sorted(starts, key=starts.__getitem__):
            rank = problem.stage_to_rank[act.stage]
            rows[rank].append(act)
        return Table.of_rows(
            rows, stage_to_rank=problem.stage_to_rank, microbatches=problem.microbatches
        )

    def _start_times(self, values: Sequence[float], kind: Kind, stage: int) -> Iterator[int]:
        """Times at which the actions of a kind and stage start, in order."""
        started = 0
        for time in range(self.makespan):
            column = self._column(_Count(kind, stage, time))
            number = round(values[column])
            for _ in range(number - started):
                yield time
            started = number

    def _column(self, count: _Count) -> int:
        block = KINDS.index(count.kind) * self.problem.num_stages + count.stage
        return block * self.makespan + count.time

    def _add_bounds(self, first: int, last: int, duration: int) -> None:
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

    def _add_rows(self) -> None:
        for stage in range(self.problem.num_stages):
            for time in range(self.makespan):
                self._add_dependencies(stage, time)
        for rank in range(self.problem.num_ranks):
            for time in range(self.makespan):
                self._add_capacity(rank, time)
                self._add_memory(rank, time)

    def _add_row(self, terms: Sequence[_Term], most: int) -> None:
        """The sum of the terms is at most `most`; n before time 0 is 0."""
        row = len(self.most)
        for term in terms:
            if term.number.time < 0:
                continue
            self.rows.append(row)
            self.columns.append(self._column(term.number))
            self.values.append(term.factor)
        self.most.append(most)

    def _add_at_most(self, count: _Count, other: _Count) -> None:
        """A count is at most another one."""
        terms = [_Term(1, count), _Term(-1, other)]
        self._add_row(terms, 0)

    def _add_dependencies(self, stage: int, time: int) -> None:
        """Numbers never fall, and an action starts after those that it needs have ended."""
        forward = _Count("F", stage, time)
        input_grad = _Count("I", stage, time)
        weight_grad = _Count("W", stage, time)
        if time > 0:
            for count in (forward, input_grad, weight_grad):
                self._add_at_most(count.before(1), count)
        if stage > 0:
            before = _Count("F", stage - 1, time)
            self._add_at_most(forward, self._arrived(before, stage))
        is_last = stage + 1 == self.problem.num_stages
        if is_last:
            loss = self._ended(forward)
            self._add_at_most(input_grad, loss)
        else:
            behind = _Count("I", stage + 1, time)
            self._add_at_most(input_grad, self._arrived(behind, stage))
        self._add_at_most(weight_grad, self._ended(input_grad))

    def _ended(self, count: _Count) -> _Count:
        """Number of actions that have ended at a time or before."""
        duration = self.problem.durations[count.kind][count.stage]
        return count.before(duration)

    def _arrived(self, count: _Count, receiver: int) -> _Count:
        """Number of actions whose output has arrived at another stage."""
        hop = self.problem.hop(count.stage, receiver)
        return self._ended(count).before(hop)

    def _add_capacity(self, rank: int, time: int) -> None:
        """A rank runs one action at a time."""
        terms: list[_Term] = []
        for stage in self.problem.stages(rank):
            for kind in KINDS:
                started = _Count(kind, stage, time)
                terms.append(_Term(1, started))
                terms.append(_Term(-1, self._ended(started)))
        self._add_row(terms, 1)

    def _add_memory(self, rank: int, time: int) -> None:
        """A rank holds at most its limit: a forward takes, the end of a W frees."""
        terms: list[_Term] = []
        for stage in self.problem.stages(rank):
            taken = _Count("F", stage, time)
            weight_grad = _Count("W", stage, time)
            freed = self._ended(weight_grad)
            terms.append(_Term(1, taken))
            terms.append(_Term(-1, freed))
        limit = self.problem.limits[rank]
        self._add_row(terms, limit)
