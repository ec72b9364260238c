"""Search of the best layout: candidates by a lower bound of their time, the first ones simulated, the best of these measured.

Note [Best first]
    Every candidate waits in a queue by a lower bound of its time. First the bound is its
    share of the work of larger blocks; when it comes to the head, its own blocks are measured, and
    it goes back with their time. When it comes to the head again, its schedule is simulated with
    the seconds of its stages. That ends when no bound is below the times of the fastest simulated
    ones. Layouts with the smallest micro-batch and one method of context parallelism come first, so
    that there are such times early. Then the fastest are measured as a whole and predicted, fastest first, until enough
    fit or no bound of another one is below the slowest that is kept. The winner is proven the best
    where no bound of a layout that was not measured is below its time. Of the ZeRO stages of a mesh
    the lowest from 1 on that fits is taken: each higher one sends more.

Note [Time limit]
    With a limit of seconds (of one core), bounds and simulations end after `RANKING_SHARE` of it,
    and no measurement begins that would end after it, if it took as long as the longest one so far; the
    first one is made in any case. Without a limit the result is the same on every machine.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.planner.candidates import Candidates, Layout, LayoutGroup, PipelineChoice
from weft.planner.layout_costs import LayoutCosts
from weft.planner.predict import Prediction

Target = Literal["time", "memory", "cost"]
HEADROOM = 0.1
"""Share of the memory that stays free: the driver, communication buffers and fragmentation."""
MOST_MEASURED = 8
"""Layouts that a search measures."""
MOST_FAILED = 3
"""Layouts that are measured and do not fit, for each one that may be measured."""
NUM_BEST = 3
FIRST_SHARE, RANKING_SHARE = 0.4, 0.55
"""Of the seconds of a search, for bounds and simulations: of the first layouts, and of all."""
PROGRESS_EVERY = 200
"""Candidates between two reports of progress."""
FRONT_SHARES = (0.75, 0.5)
"""Of the memory of the best layout, for which the fastest one is looked for."""
STATES, ACTIVATIONS, MEASURED = (
    "do not fit: parameters, gradients and optimizer states",
    "do not fit: with the activations in flight",
    "do not fit: measured peak",
)
SLOWER, MORE_SHARDED, DEEP, OPEN = (
    "slower, by a lower bound of the time",
    "a lower ZeRO stage fits, and sends less",
    "not measured: deep stages, or actions that three micro-batches lack",
    "not measured; no faster bound than the next one below",
)
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """A layout that fits, and its prediction."""

    layout: Layout
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step.total_s

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return self.prediction.peak_bytes


@dataclass
class FoundLayouts:
    """What a search has found.

    Attributes:
        best: layouts that fit, best first.
        front: of those that were measured, the fastest for each amount of memory, fastest first.
        rejected: numbers of candidates by reason.
        num_candidates: legal layouts.
        next_bound_s: lower bound of the time of the first one that was not measured; None: all
            others are slower.
        num_bounded: candidates whose time has a bound from the costs of their own blocks.
        num_simulated: candidates whose schedule was simulated.
        is_out_of_time: whether the limit of seconds ended the search.
        smallest: the candidate with the least memory by its bound, where none fits.
    """

    num_candidates: int
    best: list[Found] = field(default_factory=list)
    front: list[Found] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    next_bound_s: float | None = None
    num_bounded: int = 0
    num_simulated: int = 0
    is_out_of_time: bool = False
    smallest: tuple[float, Layout] | None = None

    @property
    def is_proven(self) -> bool:
        """Whether no layout that was not measured can be faster than the best one, besides other ZeRO
        stages of those that were.
        """
        if self.rejected[DEEP]:
            return False
        return self.next_bound_s is None or self.next_bound_s >= self.best[0].seconds


@dataclass(frozen=True)
class SearchLimits:
    """When a search ends.

    Attributes:
        memory_bytes: that a rank may use.
        most_measured: layouts that are measured.
        seconds: for all; None: no limit. See Note [Time limit].
    """

    memory_bytes: float
    most_measured: int = MOST_MEASURED
    seconds: float | None = None


def search(
    found: Candidates,
    costs: LayoutCosts,
    limits: SearchLimits,
    *,
    target: Target,
    progress: Progress | None = None,
) -> FoundLayouts:
    """The best layouts among candidates; see Note [Best first].

    Args:
        progress: takes a line of text now and then.
    """
    clock = _Clock(limits.seconds)
    result = _BestFirst(found, costs, limits, clock, progress).run()
    measured = {entry.layout: entry for entry in result.best}
    if result.best and target != "cost":
        for share in FRONT_SHARES:
            if clock.is_over(1.0):
                break
            less = SearchLimits(share * result.best[0].peak_bytes, most_measured=1)
            for entry in _BestFirst(found, costs, less, clock, progress).run().best:
                measured.setdefault(entry.layout, entry)
    result.front = pareto_front(measured.values())
    if target == "memory" and result.front:
        result.best = sorted(measured.values(), key=lambda entry: (entry.peak_bytes, entry.seconds))
    return result


class _Clock:
    """Seconds since the begin of a search; see Note [Time limit]."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.begin = time.process_time()
        self.longest_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.process_time() - self.begin

    def is_over(self, share: float) -> bool:
        """Whether this share of the limit is over, or would be after one more measurement."""
        if self.limit_s is None:
            return False
        ahead_s = self.longest_s if share == 1.0 else 0.0
        return self.elapsed_s + ahead_s > share * self.limit_s

    def note(self, begin_s: float) -> None:
        """A measurement that began then has ended."""
        self.longest_s = max(self.longest_s, self.elapsed_s - begin_s)


def smaller_change(named: Layout, costs: LayoutCosts, memory_bytes: float) -> tuple[Layout, float]:
    """The layout with the fewest changes of a named one that may fit, and the bytes that it needs
    at least; the one with the least bytes where none fits.

    Tried are higher ZeRO stages, recomputation, sequence parallelism, then twice the pipeline ranks.
    """
    twice = [(axis, 2 * degree if axis == PP else degree) for axis, degree in named.degrees]
    flags = (named.sequence, True) if named.degree(TP) > 1 else (named.sequence,)
    smallest: tuple[Layout, float] | None = None
    for degrees in dict.fromkeys((named.degrees, tuple(twice))):
        for sequence in dict.fromkeys(flags):
            for recompute in dict.fromkeys((named.recompute, "selective", "full")):
                for zero in range(named.zero, 4):
                    changed = replace(
                        named, degrees=degrees, sequence=sequence, recompute=recompute, zero=zero
                    )
                    if not costs.has_stages(changed):
                        continue
                    size = costs.bound(changed, costs.blocks(changed)).peak_bytes
                    if size <= memory_bytes:
                        return changed, size
                    if smallest is None or size < smallest[1]:
                        smallest = changed, size
    assert smallest is not None, "the named layout is legal"
    return smallest


def pareto_front(entries: Iterable[Found]) -> list[Found]:
    """The entries than which none is both faster and smaller, fastest first."""
    front: list[Found] = []
    for entry in sorted(entries, key=_by_time):
        if not front or entry.peak_bytes < front[-1].peak_bytes:
            front.append(entry)
    return front


def _by_time(entry: Found) -> tuple[object, ...]:
    return entry.seconds, entry.peak_bytes, entry.layout.order


@dataclass(order=True)
class _QueuedLayouts:
    """Layouts in the queue, by the lower bound of their time.

    Attributes:
        group, pipeline: layouts of one mesh; with one schedule where it is set.
        zeros: ZeRO stages that may fit, lowest first.
        has_blocks: whether the bound is from blocks that were measured under its own sharding.
    """

    bound_s: float
    number: int
    group: LayoutGroup = field(compare=False)
    pipeline: PipelineChoice | None = field(default=None, compare=False)
    zeros: tuple[int, ...] = field(default=(), compare=False)
    has_blocks: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.zeros) * (len(self.group.pipelines) if self.pipeline is None else 1)


@dataclass(order=True)
class _Simulated:
    """A layout with the seconds that its schedule takes.

    Attributes:
        waiting: what it was in the queue.
        zeros: ZeRO stages of it that may fit, in the order in which they are measured.
    """

    seconds: float
    number: int
    waiting: _QueuedLayouts = field(compare=False)
    zeros: tuple[int, ...] = field(compare=False)


class _BestFirst:
    """A search with one limit of memory."""

    def __init__(
        self,
        found: Candidates,
        costs: LayoutCosts,
        limits: SearchLimits,
        clock: _Clock,
        progress: Progress | None,
    ) -> None:
        self.costs = costs
        self.limits = limits
        self.clock = clock
        self.progress = progress
        self.candidates = found
        self.result = FoundLayouts(len(found))
        self.queue: list[_QueuedLayouts] = []
        self.simulated: list[_Simulated] = []
        self.fastest: list[float] = []
        """Times of the fastest simulated layouts, negative: a heap with the slowest first."""
        self.number = 0
        self.num_measured = 0
        self.num_failed = 0

    def run(self) -> FoundLayouts:
        """The result, with all that fit among the measured ones."""
        groups = self.candidates.groups
        smallest = min((group.base.micro_size for group in groups), default=1)
        context = groups[0].base.context if groups else ""
        first: list[LayoutGroup] = []
        others: list[LayoutGroup] = []
        for group in groups:
            is_first = (group.base.micro_size, group.base.context) == (smallest, context)
            (first if is_first else others).append(group)
        for group in first:
            self._add_group(group)
        self._rank(FIRST_SHARE)
        for group in others:
            self._add_group(group)
        self._rank(RANKING_SHARE)
        self.simulated.sort()
        while self.simulated and self._may_measure():
            if self._is_too_slow(self.simulated[0].waiting.bound_s):
                break
            entry = self.simulated.pop(0)
            self._report(f"measuring {entry.waiting.group.base.mesh}")
            begin_s = self.clock.elapsed_s
            self._measure(entry)
            self.clock.note(begin_s)
        self._count_rest()
        self.result.best.sort(key=_by_time)
        return self.result

    def _rank(self, share: float) -> None:
        """Bound and simulate the queue until no other layout of it may be among the fastest, or this
        share of the seconds is over.
        """
        fastest = self.fastest
        num_kept = max(NUM_BEST, self.limits.most_measured)
        num_steps = 0
        while self.queue:
            is_known = len(fastest) >= num_kept
            if is_known and self.queue[0].bound_s >= -fastest[0]:
                return
            if self.clock.is_over(share if self.simulated else 1.0):
                self.result.is_out_of_time = True
                return
            entry = self._advance(heapq.heappop(self.queue))
            if entry is not None:
                self.simulated.append(entry)
                heapq.heappush(fastest, -entry.seconds)
                if len(fastest) > num_kept:
                    heapq.heappop(fastest)
            num_steps += 1
            if num_steps % PROGRESS_EVERY == 0:
                self._report(f"{self.result.num_bounded} bounded, {len(self.simulated)} simulated")

    def _report(self, text: str) -> None:
        if self.progress is not None:
            self.progress(f"{self.clock.elapsed_s:.0f} s: {text}")

    def _advance(self, waiting: _QueuedLayouts) -> _Simulated | None:
        """Sharpen the bound of what was at the head of the queue, or simulate it."""
        if waiting.pipeline is None:
            for pipeline in waiting.group.pipelines:
                self._bound(waiting, pipeline)
            return None
        if not waiting.has_blocks:
            self._bound(waiting, waiting.pipeline, has_blocks=True)
            return None
        zeros = tuple(sorted(waiting.zeros, key=lambda zero: (zero == 0, zero)))
        seconds = self.costs.simulated_s(layout_of(waiting.group, waiting.pipeline, zeros[0]))
        self.result.num_simulated += len(waiting)
        return _Simulated(max(seconds, waiting.bound_s), waiting.number, waiting, zeros)

    def _may_measure(self) -> bool:
        if (self.num_measured or self.num_failed) and self.clock.is_over(1.0):
            self.result.is_out_of_time = True
            return False
        has_room = self.num_failed < MOST_FAILED * self.limits.most_measured
        return has_room and self.num_measured < self.limits.most_measured

    def _push(self, waiting: _QueuedLayouts) -> None:
        self.number += 1
        heapq.heappush(self.queue, replace(waiting, number=self.number))

    def _is_too_slow(self, bound_s: float) -> bool:
        times = sorted(entry.seconds for entry in self.result.best)
        return len(times) >= NUM_BEST and bound_s >= times[NUM_BEST - 1]

    def _add_group(self, group: LayoutGroup) -> None:
        """Reject what the states alone do not fit; queue the rest."""
        fitting = []
        first = group.pipelines[0]
        for zero in group.zeros:
            layout = layout_of(group, first, zero)
            states = self.costs.state_bytes(layout)
            self._note_smallest(states, layout)
            if states <= self.limits.memory_bytes:
                fitting.append(zero)
            else:
                self.result.rejected[STATES] += len(group.pipelines)
        if fitting:
            most_chunks = max(pipeline.chunks for pipeline in group.pipelines)
            bound_s = self.costs.group_bound_s(group.base, most_chunks)
            self._push(_QueuedLayouts(bound_s, 0, group, zeros=tuple(fitting)))

    def _note_smallest(self, size: float, layout: Layout) -> None:
        smallest = self.result.smallest
        if smallest is None or size < smallest[0]:
            self.result.smallest = size, layout

    def _bound(
        self, waiting: _QueuedLayouts, pipeline: PipelineChoice, *, has_blocks: bool = False
    ) -> None:
        """Queue a schedule of a group with a bound from larger blocks, or from its own ones."""
        base = waiting.group.base
        costs = self.costs.blocks(base) if has_blocks else self.costs.block_bounds(base)
        fitting = []
        seconds = []
        if has_blocks:
            self.result.num_bounded += len(waiting)
        for zero in waiting.zeros:
            bound = self.costs.bound(layout_of(waiting.group, pipeline, zero), costs)
            if bound.peak_bytes <= self.limits.memory_bytes:
                fitting.append(zero)
                seconds.append(bound.seconds)
            else:
                self.result.rejected[ACTIVATIONS] += 1
        if fitting:
            bound_s = max(waiting.bound_s, min(seconds))
            zeros = tuple(fitting)
            self._push(_QueuedLayouts(bound_s, 0, waiting.group, pipeline, zeros, has_blocks))

    def _measure(self, entry: _Simulated) -> None:
        """Measure the lowest ZeRO stage from 1 on that fits."""
        waiting = entry.waiting
        assert waiting.pipeline is not None
        for place, zero in enumerate(entry.zeros):
            layout = layout_of(waiting.group, waiting.pipeline, zero)
            if not self.costs.can_be_measured(layout):
                self.result.rejected[DEEP] += 1
                continue
            prediction = self.costs.predict(layout)
            if prediction.peak_bytes <= self.limits.memory_bytes:
                self.result.best.append(Found(layout, prediction))
                self.num_measured += 1
                self.result.rejected[MORE_SHARDED] += len(entry.zeros) - place - 1
                return
            self.result.rejected[MEASURED] += 1
            self.num_failed += 1

    def _count_rest(self) -> None:
        rest = [*self.queue, *(entry.waiting for entry in self.simulated)]
        for waiting in rest:
            is_slower = self._is_too_slow(waiting.bound_s)
            self.result.rejected[SLOWER if is_slower else OPEN] += len(waiting)
            if not is_slower:
                bound_s = self.result.next_bound_s
                smaller = waiting.bound_s if bound_s is None else min(bound_s, waiting.bound_s)
                self.result.next_bound_s = smaller


def layout_of(group: LayoutGroup, pipeline: PipelineChoice, zero: int) -> Layout:
    """The layout of a group with this schedule and ZeRO stage."""
    return replace(
        group.base,
        zero=zero,
        schedule=pipeline.schedule,
        chunks=pipeline.chunks,
        split=pipeline.split,
    )
