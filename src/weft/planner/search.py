"""Search of the best layout: candidates in the order of a lower bound of their time, the first ones measured.

Note [Best first]
    Every candidate waits in a queue by a lower bound of its time. First the bound is its
    share of the work of larger blocks; when it comes to the head, its own blocks are measured, and
    it goes back with their time. When it comes to the head again, the whole layout is measured and
    predicted. The search ends
    when no bound is below the slowest layout that is kept, or when enough layouts have been
    measured; then it says what the bound of the next one was. Of the ZeRO stages of a mesh the
    lowest from 1 on that fits is measured: each higher one sends more.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

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
        smallest: the candidate with the least memory by its bound, where none fits.
    """

    num_candidates: int
    best: list[Found] = field(default_factory=list)
    front: list[Found] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    next_bound_s: float | None = None
    smallest: tuple[float, Layout] | None = None


@dataclass(frozen=True)
class SearchLimits:
    """When a search ends.

    Attributes:
        memory_bytes: that a rank may use.
        most_measured: layouts that are measured.
    """

    memory_bytes: float
    most_measured: int = MOST_MEASURED


def search(
    found: Candidates, costs: LayoutCosts, limits: SearchLimits, *, target: Target
) -> FoundLayouts:
    """The best layouts among candidates; see Note [Best first]."""
    result = _BestFirst(found, costs, limits).run()
    measured = {entry.layout: entry for entry in result.best}
    if result.best and target != "cost":
        for share in FRONT_SHARES:
            less = SearchLimits(share * result.best[0].peak_bytes, most_measured=2)
            for entry in _BestFirst(found, costs, less).run().best:
                measured.setdefault(entry.layout, entry)
    result.front = pareto_front(measured.values())
    if target == "memory" and result.front:
        result.best = sorted(measured.values(), key=lambda entry: (entry.peak_bytes, entry.seconds))
    return result


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


class _BestFirst:
    """A search with one limit of memory."""

    def __init__(self, found: Candidates, costs: LayoutCosts, limits: SearchLimits) -> None:
        self.costs = costs
        self.limits = limits
        self.candidates = found
        self.result = FoundLayouts(len(found))
        self.queue: list[_QueuedLayouts] = []
        self.number = 0
        self.num_measured = 0
        self.num_failed = 0

    def run(self) -> FoundLayouts:
        """The result, with all that fit among the measured ones."""
        for group in self.candidates.groups:
            self._add_group(group)
        while self.queue and self._may_measure():
            waiting = heapq.heappop(self.queue)
            if self._is_too_slow(waiting.bound_s):
                heapq.heappush(self.queue, waiting)
                break
            if waiting.pipeline is None:
                for pipeline in waiting.group.pipelines:
                    self._bound(waiting, pipeline)
            elif not waiting.has_blocks:
                self._bound(waiting, waiting.pipeline, has_blocks=True)
            else:
                self._measure(waiting)
        self._count_rest()
        self.result.best.sort(key=_by_time)
        return self.result

    def _may_measure(self) -> bool:
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
        seconds = waiting.bound_s
        for zero in waiting.zeros:
            bound = self.costs.bound(layout_of(waiting.group, pipeline, zero), costs)
            seconds = max(bound.seconds, waiting.bound_s)
            if bound.peak_bytes <= self.limits.memory_bytes:
                fitting.append(zero)
            else:
                self.result.rejected[ACTIVATIONS] += 1
        if fitting:
            zeros = tuple(fitting)
            self._push(_QueuedLayouts(seconds, 0, waiting.group, pipeline, zeros, has_blocks))

    def _measure(self, waiting: _QueuedLayouts) -> None:
        """Measure the lowest ZeRO stage from 1 on that fits."""
        assert waiting.pipeline is not None
        order = sorted(waiting.zeros, key=lambda zero: (zero == 0, zero))
        for place, zero in enumerate(order):
            layout = layout_of(waiting.group, waiting.pipeline, zero)
            if not self.costs.can_be_measured(layout):
                self.result.rejected[DEEP] += 1
                continue
            prediction = self.costs.predict(layout)
            if prediction.peak_bytes <= self.limits.memory_bytes:
                self.result.best.append(Found(layout, prediction))
                self.num_measured += 1
                self.result.rejected[MORE_SHARDED] += len(order) - place - 1
                return
            self.result.rejected[MEASURED] += 1
            self.num_failed += 1

    def _count_rest(self) -> None:
        for waiting in self.queue:
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
