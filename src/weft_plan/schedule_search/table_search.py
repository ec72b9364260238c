"""Search for the shortest split-backward table under memory limits: greedy and built-in tables, then integer programs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from weft.errors import Fault, ScheduleError, counted
from weft.schedule.actions import Act, Table
from weft.schedule.costs import ScheduleCosts, StageCosts
from weft.schedule.simulate import action_times
from weft_plan.schedule_search.compare import ScheduleFigures, accepting, compare
from weft_plan.schedule_search.greedy import greedy_tables
from weft_plan.schedule_search.program import (
    KINDS,
    SchedulingProblem,
    import_scipy,
    num_variables,
    solve,
)

LIMIT_KEY = "memory_limit"
MAX_ACTIONS = 20_000
"""F, I and W of the largest table that is searched."""
MAX_VARIABLES = 40_000
"""Of the largest integer program that is tried."""
GREEDY_SHARE = Fraction(1, 4)
"""Part of the time for greedy tables of one placement."""
PROBES = 16
"""A program for the bound takes at most this part of the time."""

PLACEMENTS = {1: "one stage a rank", 2: "two stages a rank in a V"}
"""Stages a rank -> placement, in words."""


@dataclass(frozen=True)
class SearchRequest:
    """What is searched.

    Attributes:
        limits: for each rank the most activations it may hold, in those of its whole share of the
            model for one micro-batch.
        chunks: stages a rank, 1 or 2 (in a V).
        seconds: for the whole search.
    """

    ranks: int
    microbatches: int
    limits: tuple[Fraction, ...]
    costs: ScheduleCosts = field(default_factory=ScheduleCosts)
    chunks: tuple[int, ...] = tuple(PLACEMENTS)
    seconds: float = 20.0

    def check(self) -> None:
        """Reject a request that no table answers, or that is too large.

        Raises:
            ScheduleError: with every fault.
        """
        faults = tuple(self._faults())
        if faults:
            raise ScheduleError(*faults)

    def _faults(self) -> Iterator[Fault]:
        if len(self.limits) != self.ranks:
            yield Fault(
                LIMIT_KEY,
                "another number of ranks",
                got=f"{len(self.limits)} limits",
                need=f"1, or {self.ranks}: one a rank",
            )
        least = min(self.limits, default=Fraction(1))
        if least < 1:
            yield Fault(
                LIMIT_KEY,
                "no table holds so few activations",
                got=f"{float(least):g}",
                need="at least 1: one micro-batch through all stages of a rank",
                fix="--memory-limit 1",
            )
        num_stages = self.ranks * max(self.chunks)
        num_actions = len(KINDS) * num_stages * self.microbatches
        if num_actions > MAX_ACTIONS:
            yield Fault(
                "search",
                "too large to be searched",
                got=f"{num_actions} actions",
                need=f"at most {MAX_ACTIONS}",
                fix="fewer ranks or micro-batches",
            )


@dataclass(frozen=True)
class _FoundTable:
    """A table, and what found it."""

    figures: ScheduleFigures
    origin: str

    @property
    def order(self) -> tuple[Fraction, Fraction]:
        """Sorts tables: the shortest first, of equal ones that with the least memory."""
        return self.figures.makespan, max(self.figures.held)

    @staticmethod
    def built_in(figures: ScheduleFigures) -> _FoundTable:
        """A built-in schedule."""
        return _FoundTable(figures, f"built-in schedule {figures.label}")


@dataclass(frozen=True)
class PlacementResult:
    """What the search knows about one placement of stages.

    Attributes:
        figures: of the best table that was found.
        bound: no table of this placement is shorter.
        origin: what found the table.
        note: why the integer program was not used; "" where it was, or was not needed.
    """

    chunks: int
    figures: ScheduleFigures
    bound: Fraction
    origin: str
    note: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The best table, and what it is compared with.

    Attributes:
        best: of all placements and of the built-in schedules within the limits.
        origin: what found it.
        placements: results of the searched placements.
        built_in: built-in schedules that accept the sizes; also those above the limits.
    """

    request: SearchRequest
    best: ScheduleFigures
    origin: str
    placements: tuple[PlacementResult, ...]
    built_in: tuple[ScheduleFigures, ...]

    @property
    def bound(self) -> Fraction:
        """No table of the searched placements is shorter."""
        return min(result.bound for result in self.placements)

    @property
    def is_optimal(self) -> bool:
        """Whether no table of the searched placements is shorter than the best one."""
        return self.best.makespan <= self.bound

    @property
    def gap(self) -> Fraction:
        """How much longer than the bound the best table is, as a share of the bound."""
        return max(self.best.makespan / self.bound - 1, Fraction(0))


def search(request: SearchRequest) -> SearchResult:
    """The best table that is found within the time of the request.

    Raises:
        ScheduleError: the request is rejected, or scipy is not installed.
    """
    request.check()
    import_scipy("optimize")
    deadline_s = time.monotonic() + request.seconds
    built_in = _built_in(request)
    allowed = [figures for figures in built_in if _is_allowed(figures, request)]
    results: list[PlacementResult] = []
    for chunks in _placements(request):
        result = _greedy(request, chunks, allowed, deadline_s)
        results.append(result)
    for index, result in enumerate(results):
        num_left = len(results) - index
        now_s = time.monotonic()
        share_s = max(deadline_s - now_s, 0.0) / num_left
        known = [other.figures.makespan for other in results]
        known.extend(figures.makespan for figures in allowed)
        results[index] = _solve(request, result, min(known), deadline_s=now_s + share_s)
    found = [_FoundTable(result.figures, result.origin) for result in results]
    found.extend(_FoundTable.built_in(figures) for figures in allowed)
    best = min(found, key=lambda table: table.order)
    return SearchResult(
        request=request,
        best=best.figures,
        origin=best.origin,
        placements=tuple(results),
        built_in=built_in,
    )


def fits(figures: ScheduleFigures, limits: Sequence[Fraction]) -> bool:
    """Whether no rank holds more than its limit."""
    pairs = zip(figures.held, limits, strict=True)
    return all(held <= limit for held, limit in pairs)


def _is_allowed(figures: ScheduleFigures, request: SearchRequest) -> bool:
    """Whether a built-in schedule answers the request."""
    if not fits(figures, request.limits):
        return False
    if request.chunks == tuple(PLACEMENTS):
        return True
    placements = [_stage_to_rank(request.ranks, chunks) for chunks in request.chunks]
    return figures.table.stage_to_rank in placements


def _placements(request: SearchRequest) -> tuple[int, ...]:
    """Stages a rank for which there are costs.

    Raises:
        ScheduleError: for none.
    """
    found: list[int] = []
    for chunks in request.chunks:
        try:
            _stage_costs(request, chunks)
        except ScheduleError:
            continue
        found.append(chunks)
    if not found:
        _stage_costs(request, request.chunks[0])
    return tuple(found)


def _stage_costs(request: SearchRequest, chunks: int) -> StageCosts:
    num_stages = request.ranks * chunks
    return request.costs.of_stages(num_stages=num_stages, chunks=chunks)


def _built_in(request: SearchRequest) -> tuple[ScheduleFigures, ...]:
    """The built-in schedules that accept the sizes, and for whose stages there are costs."""
    found: list[ScheduleFigures] = []
    sizes = {"ranks": request.ranks, "microbatches": request.microbatches}
    for figures in compare(accepting(**sizes), request.costs, **sizes):
        try:
            _stage_costs(request, figures.chunks)
        except ScheduleError:
            continue
        found.append(figures)
    return tuple(found)


def _stage_to_rank(ranks: int, chunks: int) -> tuple[int, ...]:
    """The placements of `PLACEMENTS`."""
    straight = tuple(range(ranks))
    if chunks == 1:
        return straight
    return (*straight, *reversed(straight))


@dataclass(frozen=True)
class _Scaled:
    """A problem whose times are whole numbers of `unit`."""

    problem: SchedulingProblem
    unit: Fraction


def _scaled(request: SearchRequest, chunks: int) -> _Scaled:
    """The problem in the largest unit in which all of its times are whole numbers."""
    costs = _stage_costs(request, chunks)
    times = [*costs.forward, *costs.input_grad, *costs.weight_grad, costs.message]
    unit = _common_unit(times)

    def whole(times: Sequence[Fraction]) -> tuple[int, ...]:
        return tuple(int(time / unit) for time in times)

    limits = [int(limit * chunks) for limit in request.limits]
    problem = SchedulingProblem(
        stage_to_rank=_stage_to_rank(request.ranks, chunks),
        microbatches=request.microbatches,
        durations={
            "F": whole(costs.forward),
            "I": whole(costs.input_grad),
            "W": whole(costs.weight_grad),
        },
        message=int(costs.message / unit),
        limits=tuple(limits),
    )
    return _Scaled(problem, unit)


def _common_unit(times: Sequence[Fraction]) -> Fraction:
    """The largest time of which all others are multiples."""
    denominators = [time.denominator for time in times]
    scale = math.lcm(*denominators)
    whole = [int(time * scale) for time in times]
    return Fraction(math.gcd(*whole), scale)


def _greedy(
    request: SearchRequest, chunks: int, allowed: Iterable[ScheduleFigures], deadline_s: float
) -> PlacementResult:
    """The best of the greedy tables and of the built-in schedules of this placement."""
    scaled = _scaled(request, chunks)
    share_s = request.seconds * float(GREEDY_SHARE)
    greedy_s = min(deadline_s, time.monotonic() + share_s)
    found = []
    for table in greedy_tables(scaled.problem, deadline_s=greedy_s):
        figures = _figures(table, request.costs)
        found.append(_FoundTable(figures, "heuristic"))
    found.extend(
        _FoundTable.built_in(figures)
        for figures in allowed
        if figures.table.stage_to_rank == scaled.problem.stage_to_rank
    )
    best = min(found, key=lambda table: table.order)
    bound = scaled.problem.least_makespan() * scaled.unit
    return PlacementResult(chunks, figures=best.figures, bound=bound, origin=best.origin)


def _figures(table: Table, costs: ScheduleCosts) -> ScheduleFigures:
    return ScheduleFigures("searched", table, costs)


def _solve(
    request: SearchRequest, start: PlacementResult, known: Fraction, *, deadline_s: float
) -> PlacementResult:
    """The result of a placement after the integer programs for makespans below `known`."""
    scaled = _scaled(request, start.chunks)
    low = int(start.bound / scaled.unit)
    high = math.ceil(known / scaled.unit)
    if low >= high:
        return start
    size = num_variables(scaled.problem, high)
    if size > MAX_VARIABLES:
        variables = counted(size, "variable")
        note = f"integer program of {variables}: at most {MAX_VARIABLES} are tried"
        return replace(start, note=note)
    bisection = _Bisection(scaled.problem, low, high, deadline_s)
    bisection.run()
    bound = min(bisection.proven * scaled.unit, known)
    note = ""
    if not bisection.is_finished:
        note = "the time was over before all makespans were decided"
    bounded = replace(start, bound=bound, note=note)
    if bisection.table is None:
        return bounded
    figures = _figures(bisection.table, request.costs)
    return replace(bounded, figures=figures, origin="integer program")


@dataclass
class _Bisection:
    """Programs for makespans between `low` and `high` - 1.

    Attributes:
        proven: no shorter table exists.
        high: makespan of the shortest table that is known.
        table: it, if a program has found it.
    """

    problem: SchedulingProblem
    proven: int
    high: int
    deadline_s: float
    table: Table | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the shortest known table is proven to be the shortest."""
        return self.proven >= self.high

    def run(self) -> None:
        """First the bound, by programs of little time each: those without a solution are decided
        soon. Then tables, from the shortest makespan that is left.
        """
        self._raise_bound()
        lowest = self.proven
        target = lowest
        while lowest < self.high and self._has_time:
            is_decided = self._ask(target, self._seconds / 2)
            if not is_decided:
                lowest = target + 1
            lowest = max(lowest, self.proven)
            target = (lowest + self.high) // 2

    def _raise_bound(self) -> None:
        probe_s = self._seconds / PROBES
        undecided = self.high
        while self.proven < undecided and self._has_time:
            middle = (self.proven + undecided) // 2
            is_decided = self._ask(middle, probe_s)
            undecided = min(undecided, self.high) if is_decided else middle

    @property
    def _has_time(self) -> bool:
        return self._seconds > 0

    @property
    def _seconds(self) -> float:
        """Seconds until the deadline; 0 where they are too few for a program."""
        left = self.deadline_s - time.monotonic()
        return left if left > MIN_SECONDS else 0.0

    def _ask(self, makespan: int, seconds: float) -> bool:
        """Solve one program; whether it was decided."""
        limit_s = max(seconds, MIN_SECONDS)
        answer = solve(self.problem, makespan, seconds=limit_s)
        if answer == "none exists":
            self.proven = makespan + 1
        elif isinstance(answer, Table):
            self.table = answer
            self.high = min(makespan, self._makespan(answer))
        return answer != "not known"

    def _makespan(self, table: Table) -> int:
        """Makespan of a table when every action starts as soon as it can."""
        durations = self.problem.durations

        def duration(act: Act) -> int:
            return durations[act.kind][act.stage]

        intervals = action_times(table, duration, hop=self.problem.message)
        last_end = max(interval.end for interval in intervals.values())
        return int(last_end)


MIN_SECONDS = 0.1
"""Shortest time for a program."""
