"""Search of the best layout: shardings by a lower bound, all their layouts simulated, the best of these measured.

Note [Best first]
    Layouts with equal sharding (degrees of tp, cp and ep, micro-batch, recomputation, sequence
    parallelism, method of context parallelism) have equal blocks. Shardings wait in a queue by a
    lower bound of the target, from larger blocks. At the head of it, the blocks of a sharding are
    measured, and each of its layouts (order and degrees of pp and dp, ZeRO stage, schedule, chunks)
    gets a bound from them; those whose bound is near the best are simulated. Before that, layouts
    are left out whose activations do not fit as shares of those of larger blocks: these are
    measured once for many shardings. All that ends when no bound in the queue is below the best
    simulated ones, as many as are measured. Pipelines among the best are also simulated with other
    layers a stage (stage_split.py). Then the best are measured as a whole (measured_layouts.py), best
    first, until enough fit. The winner is proven the best where no bound of a layout that was not
    measured is below it.

    Before all that, some usual layouts are simulated (usual_layouts.py): so a search that the limit
    ends early is not worse than what anyone tries first.

Note [Two targets]
    Ranked by time, lean layouts are never reached: those with recomputation, small micro-batches and
    high ZeRO stages. So a part of the seconds ranks by memory; for the Pareto front layouts of
    both rankings are taken. Layouts of that ranking whose bound of the target is below the best ones
    are simulated, too: bounds of time without recomputation are so low that others wait behind them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from weft.core.sequence import DEFAULT_CONTEXT
from weft_plan.search.candidates import Candidates, LayoutGroup
from weft_plan.search.found_layouts import (
    ACTIVATIONS,
    OPEN,
    SIMULATED_PEAK,
    SIMULATED_SLOWER,
    SLOWER,
    STATES,
    FoundLayouts,
    Target,
)
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_costs import Bound, LayoutCosts, Simulated
from weft_plan.search.limits import (
    BOUNDING_SHARE,
    FRONT_RANKING_SHARE,
    NEIGHBOURS_SHARE,
    NOTHING_FITS_SHARE,
    RANKING_SHARE,
    SPLITS_SHARE,
    USUAL_SHARE,
    Clock,
    SearchLimits,
)
from weft_plan.search.measured_layouts import LayoutMeasurements
from weft_plan.search.shardings import (
    LEANEST_FIRST,
    Sharding,
    holds_more,
    leanness,
    neighbours,
    plausibility,
)
from weft_plan.search.stage_split import best_split
from weft_plan.search.usual_layouts import usual_layouts

NUM_BEST = 3
SIMULATED_WITHIN = 1.5
"""A layout is simulated where its bound is at most so many times the best simulated one."""
PEAK_ERROR = 0.05
"""By which a simulated peak, or a bound from larger blocks, may be too large: these have buffers of
fixed size, too, of which smaller blocks have less than a share. Such layouts are measured, too.
"""
MOST_SPLIT = 6
"""Pipelines whose layers a stage are searched."""
Objective = Literal["time", "memory"]
Progress = Callable[[str], None]


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
    return _LayoutSearch(found, costs, limits, target, progress).run()


def objective_of(value: Bound | Simulated, objective: Objective) -> float:
    """The value that the search minimizes: seconds, or bytes."""
    return value.seconds if objective == "time" else value.peak_bytes


class _LayoutSearch:
    """One search; `run` once."""

    def __init__(
        self,
        found: Candidates,
        costs: LayoutCosts,
        limits: SearchLimits,
        target: Target,
        progress: Progress | None,
    ) -> None:
        self.candidates = found
        self.costs = costs
        self.limits = limits
        self.objective: Objective = "memory" if target == "memory" else "time"
        self.progress = progress
        self.clock = Clock(limits.seconds)
        self.result = FoundLayouts(len(found), target)
        self.waiting: dict[Layout, Sharding] = {}
        self.known_bounds: dict[Layout, float] = {}
        """Bounds of the objective of shardings, by their layout on one pipeline and data rank."""
        self.none_fits: list[Layout] = []
        """Shardings of which no layout fits."""
        self.simulated: list[Simulated] = []
        self.too_large: list[Simulated] = []
        self.bounded: list[tuple[Bound, Layout]] = []
        """Layouts with a bound from their own blocks that were not simulated."""
        self.bounds: dict[Layout, Bound] = {}
        self.best: dict[Objective, list[float]] = {"time": [], "memory": []}
        """Best simulated values, negative: a heap with the worst one first."""
        self.num_expanded = 0
        self.num_simulated: Counter[Layout] = Counter()
        """By sharding, of the usual layouts."""

    def run(self) -> FoundLayouts:
        """The result, with all that fit among the measured ones."""
        for group in self.candidates.groups:
            self._add_group(group)
        self._simulate_usual()
        self._rank(self.objective, RANKING_SHARE)
        if not self.simulated:
            self._rank_leanest()
        if self.limits.has_front:
            other: Objective = "memory" if self.objective == "time" else "time"
            self._rank(other, FRONT_RANKING_SHARE, is_aside=True)
        self._rank_neighbours()
        if self.limits.splits:
            self._search_splits()
        measurements = LayoutMeasurements(
            self.costs, self.limits, self.clock, self.result, report=self._report
        )
        measurements.measure_best(self.simulated)
        if self.limits.has_front:
            measurements.measure_front(self.simulated)
        self._count_rest()
        return self.result

    # ranking

    def _add_group(self, group: LayoutGroup) -> None:
        """Reject what the states alone do not fit; queue the rest with its sharding."""
        fitting = []
        for zero in group.zeros:
            leanest = self.costs.leanest_pipeline(group, zero)
            layout = group.layout(leanest, zero)
            states = self.costs.state_bytes(layout)
            smallest = self.result.smallest
            if smallest is None or states < smallest[0]:
                self.result.smallest = states, layout
            if states <= self.limits.memory_bytes:
                fitting.append(zero)
            else:
                self.result.rejected[STATES] += len(group.pipelines)
        if not fitting:
            return
        key = group.base.sharding
        if key not in self.waiting:
            is_other = key.context != DEFAULT_CONTEXT
            leanness = LEANEST_FIRST.index(key.recompute)
            rest = key.micro_size, is_other, leanness, not key.sequence, len(self.waiting)
            self.waiting[key] = Sharding(0.0, rest, key, [])
        self.waiting[key].groups.append((group, tuple(fitting)))

    def _simulate_usual(self) -> None:
        """Simulate the usual layouts, each with the first options whose activations may fit."""
        for layouts in usual_layouts(self.candidates, self.costs.speeds.hardware.node):
            if self.simulated and self.clock.is_over(USUAL_SHARE):
                return
            for layout in layouts:
                if self.costs.state_bytes(layout) > self.limits.memory_bytes:
                    continue
                bound = self.costs.bound(layout, self.costs.blocks(layout))
                if bound.peak_bytes <= self.limits.memory_bytes:
                    self.result.num_bounded += 1
                    self.num_simulated[layout.sharding] += 1
                    self._simulate(layout, bound)
                    break

    def _rank(self, objective: Objective, share: float, *, is_aside: bool = False) -> None:
        """Measure the blocks of shardings and simulate their layouts until no bound in the queue is
        below the best simulated ones, or this share of the seconds is over.

        Args:
            is_aside: the ranking serves the front alone.
        """
        queue = self._bounded_shardings(objective, is_aside=is_aside)
        heapq.heapify(queue)
        while queue:
            if queue[0].bound >= self._worst_of_best(objective):
                return
            has_ended = self.clock.is_over(share if self.simulated else NOTHING_FITS_SHARE)
            if has_ended and self.num_expanded:
                self.result.is_out_of_time |= not is_aside
                return
            self._expand_next(queue, objective)

    def _expand_next(self, queue: list[Sharding], objective: Objective) -> None:
        """Expand the sharding at the head of a queue."""
        sharding = heapq.heappop(queue)
        del self.waiting[sharding.key]
        self.num_expanded += 1
        self._expand(sharding, objective)
        num_simulated = self.result.num_simulated
        self._report(f"{self.result.num_bounded} bounded, {num_simulated} simulated")

    def _bounded_shardings(self, objective: Objective, *, is_aside: bool) -> list[Sharding]:
        """The waiting shardings with their bounds, as far as the limit of seconds allows."""
        node = self.costs.speeds.hardware.node

        def plausible_first(sharding: Sharding) -> tuple[object, ...]:
            return plausibility(sharding, node)

        by_blocks: dict[object, list[Sharding]] = {}
        for sharding in sorted(self.waiting.values(), key=plausible_first):
            blocks = sharding.key.block_degrees, sharding.key.sequence
            by_blocks.setdefault(blocks, []).append(sharding)
        found: list[Sharding] = []
        for shardings in by_blocks.values():
            if found and not is_aside and self.clock.is_over(BOUNDING_SHARE):
                self.result.is_out_of_time = True
                break
            for sharding in shardings:
                bound = self._sharding_bound(sharding, objective)
                if not is_aside:
                    self.known_bounds[sharding.key] = bound
                found.append(replace(sharding, bound=bound))
        return found

    def _rank_leanest(self) -> None:
        """Expand the leanest shardings that have a bound, best bound first, until one layout fits
        and `RANKING_SHARE` of the seconds is over; without one that fits until all of them are.
        """
        bounded = [each for each in self.waiting.values() if each.key in self.known_bounds]
        leanest = min(map(leanness, bounded), default=None)
        queue: list[Sharding] = [
            replace(sharding, bound=self.known_bounds[sharding.key])
            for sharding in bounded
            if leanness(sharding) == leanest
        ]
        heapq.heapify(queue)
        while queue:
            self._expand_next(queue, self.objective)
            if self.clock.is_over(RANKING_SHARE if self.simulated else 1.0):
                return

    def _rank_neighbours(self) -> None:
        """Expand the shardings beside the one of the best layout, as long as some have a bound below
        the best simulated ones; see Note [Time limit].
        """
        while self.simulated and not self.clock.is_over(NEIGHBOURS_SHARE):
            best = min(self.simulated, key=self.result.order)
            limit = self._worst_of_best(self.objective)
            bounded: list[Sharding] = []
            for sharding in self.waiting.values():
                bound = self.known_bounds.get(sharding.key, limit)
                if bound < limit:
                    bounded.append(replace(sharding, bound=bound))
            beside = neighbours(best.layout, bounded)
            if not beside:
                return
            self._expand_next(beside[:1], self.objective)

    def _worst_of_best(self, objective: Objective) -> float:
        best = self.best[objective]
        num_kept = max(NUM_BEST, self.limits.most_measured)
        return -best[0] if len(best) >= num_kept else float("inf")

    def _sharding_bound(self, sharding: Sharding, objective: Objective) -> float:
        """The least of its layouts, from larger blocks."""
        if objective == "time":
            return min(self._least_seconds(group) for group, _ in sharding.groups)
        if self.objective == "time":
            return min(self._least_states(group, zeros) for group, zeros in sharding.groups)
        least_bytes = min(peak_bytes for _, peak_bytes in self._least_peaks(sharding))
        return least_bytes / (1 + PEAK_ERROR)

    def _least_seconds(self, group: LayoutGroup) -> float:
        most_chunks = max(pipeline.chunks for pipeline in group.pipelines)
        return self.costs.group_bound(group.base, most_chunks)

    def _least_states(self, group: LayoutGroup, zeros: Sequence[int]) -> float:
        most_sharded = max(zeros)
        leanest = self.costs.leanest_pipeline(group, most_sharded)
        layout = group.layout(leanest, most_sharded)
        return self.costs.state_bytes(layout)

    def _least_peaks(self, sharding: Sharding) -> Iterator[tuple[Layout, float]]:
        """The layouts of a sharding, and the bytes that each needs at least, from larger blocks."""
        for group, zeros in sharding.groups:
            costs = self.costs.larger_blocks(group.base)
            for pipeline in group.pipelines:
                for zero in zeros:
                    layout = group.layout(pipeline, zero)
                    yield layout, self.costs.least_peak(layout, costs)

    def _expand(self, sharding: Sharding, objective: Objective) -> None:
        """Bound the layouts of a sharding by its own blocks, and simulate the better ones."""
        bounded: list[tuple[Bound, Layout]] = []
        for layout in self._that_may_fit(sharding):
            if layout in self.bounds:  # a usual one
                continue
            bound = self.costs.bound(layout, self.costs.blocks(layout))
            self.result.num_bounded += 1
            if bound.peak_bytes > self.limits.memory_bytes:
                self.result.rejected[ACTIVATIONS] += 1
            else:
                bounded.append((bound, layout))
        bounded.sort(key=lambda entry: objective_of(entry[0], objective))
        for bound, layout in bounded:
            best = self.best[objective]
            limit = -max(best) * SIMULATED_WITHIN if best else float("inf")
            is_late = bool(self.simulated) and self.clock.is_over(1.0)
            is_near = objective_of(bound, objective) <= limit  # see Note [Two targets]
            may_be_best = objective_of(bound, self.objective) < self._worst_of_best(self.objective)
            if (is_near or may_be_best) and not is_late:
                self._simulate(layout, bound)
            else:
                self.bounded.append((bound, layout))

    def _that_may_fit(self, sharding: Sharding) -> list[Layout]:
        """The layouts of a sharding whose activations fit as shares of those of larger blocks."""
        if any(holds_more(sharding.key, other) for other in self.none_fits):
            self.result.rejected[ACTIVATIONS] += len(sharding)
            return []
        most_bytes = (1 + PEAK_ERROR) * self.limits.memory_bytes
        found: list[Layout] = []
        for layout, peak_bytes in self._least_peaks(sharding):
            if peak_bytes > most_bytes:
                self.result.rejected[ACTIVATIONS] += 1
            else:
                found.append(layout)
        if not found:
            self.none_fits.append(sharding.key)
        return found

    def _simulate(self, layout: Layout, bound: Bound) -> None:
        entry = self.costs.simulate(layout)
        entry = replace(
            entry,
            seconds=max(entry.seconds, bound.seconds),
            peak_bytes=max(entry.peak_bytes, bound.peak_bytes),
        )
        self.result.num_simulated += 1
        self.bounds[layout] = bound
        if entry.peak_bytes > (1 + PEAK_ERROR) * self.limits.memory_bytes:
            self.too_large.append(entry)
            return
        self.simulated.append(entry)
        num_kept = max(NUM_BEST, self.limits.most_measured)
        for objective, best in self.best.items():
            heapq.heappush(best, -objective_of(entry, objective))
            if len(best) > num_kept:
                heapq.heappop(best)

    def _search_splits(self) -> None:
        """Simulate the best pipelines with other layers a stage."""
        self.simulated.sort(key=self.result.order)
        num_tried = 0
        for entry in list(self.simulated):
            if num_tried == MOST_SPLIT or self.clock.is_over(SPLITS_SHARE):
                return
            if not self.costs.can_split(entry.layout):
                continue
            num_tried += 1
            better = best_split(entry, self.costs, self.limits.memory_bytes)
            if better is not None:
                bound = self.costs.bound(better.layout, self.costs.blocks(better.layout))
                self._simulate(better.layout, bound)
                self.result.num_candidates += 1
                self.result.num_bounded += 1

    # what is left

    def _count_rest(self) -> None:
        """Count the layouts that were not measured, by reason, with their least bound."""
        result = self.result
        best = result.value(result.best[0]) if result.best else float("inf")
        result.rejected[SIMULATED_SLOWER] += len(self.simulated)
        result.rejected[SIMULATED_PEAK] += len(self.too_large)
        left: list[float] = [
            result.value(self.bounds[entry.layout]) for entry in (*self.simulated, *self.too_large)
        ]
        for bound, _ in self.bounded:
            value = result.value(bound)
            result.rejected[_reason_left(value, best)] += 1
            left.append(value)
        for sharding in self.waiting.values():
            known = self.known_bounds.get(sharding.key)
            num_left = len(sharding) - self.num_simulated[sharding.key]
            if known is None:
                result.num_unbounded += num_left
                result.rejected[OPEN] += num_left
                continue
            result.rejected[_reason_left(known, best)] += num_left
            left.append(known)
        below = [value for value in left if value < best]
        result.next_bound = min(below, default=None)
        result.next_simulated = min(self.simulated, key=result.order, default=None)
        fitting = [each for each in self.simulated if each.peak_bytes <= self.limits.memory_bytes]
        result.fitting_simulated = min(fitting, key=result.order, default=None)

    def _report(self, text: str) -> None:
        if self.progress is not None:
            self.progress(f"{self.clock.elapsed_s:.0f} s: {text}")


def _reason_left(bound: float, best: float) -> str:
    """Why a layout with this bound was not simulated."""
    return SLOWER if bound >= best else OPEN
