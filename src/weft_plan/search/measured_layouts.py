"""Measurement of the best layouts of a search as a whole, and of some along the Pareto front.

Note [Peaks of measured layouts]
    A simulated peak may be some percent too small. Where a measured one is larger, the peaks of the
    layouts with the same pipeline and recomputation are taken to be larger by the same ratio, so
    that layouts which differ in a detail are not measured one after the other and found too large.
    Where no layout fits and there is time for one more measurement, the smallest one is measured.
"""

from __future__ import annotations

from collections.abc import Callable

from weft_plan.search.found_layouts import (
    DEEP,
    MEASURED,
    Found,
    FoundLayouts,
    PeakRatios,
    pareto_front,
    thinned_front,
)
from weft_plan.search.layout_costs import LayoutCosts, Simulated
from weft_plan.search.limits import Clock, SearchLimits

MOST_FAILED = 3
"""Layouts that are measured and do not fit, for each one that may be measured."""
MOST_FRONT = 3
"""Layouts of the Pareto front that are measured besides the best ones."""


class LayoutMeasurements:
    """Measures layouts of one search, and notes them in its result.

    Args:
        report: takes a line of text before each measurement.
    """

    def __init__(
        self,
        costs: LayoutCosts,
        limits: SearchLimits,
        clock: Clock,
        result: FoundLayouts,
        *,
        report: Callable[[str], None],
    ) -> None:
        self.costs = costs
        self.limits = limits
        self.clock = clock
        self.result = result
        self.report = report
        self.peak_ratios = PeakRatios()
        self.num_measured = 0
        self.num_failed = 0

    def measure_best(self, simulated: list[Simulated]) -> None:
        """Measure the best simulated layouts until enough of them fit; they leave the list."""
        simulated.sort(key=self.result.order)
        while simulated and self._may_measure():
            entry = self._next_of(simulated)
            simulated.remove(entry)
            self._measure(entry)
        self.result.best.sort(key=self.result.order)

    def measure_front(self, simulated: list[Simulated]) -> None:
        """Measure layouts along the Pareto front of those that were simulated; they leave the list."""
        result = self.result
        entries = list(simulated)
        entries.extend(found.simulated for found in result.best if found.simulated is not None)
        known = {found.layout for found in result.best}
        front = pareto_front(entries)
        for entry in thinned_front(front, MOST_FRONT + 1):
            if entry.layout in known or self.clock.is_over(1.0):
                continue
            simulated.remove(entry)
            self._measure(entry)
        result.front = pareto_front(result.best)
        result.simulated_front = pareto_front(simulated)
        result.best.sort(key=result.order)

    def _next_of(self, simulated: list[Simulated]) -> Simulated:
        """The best simulated layout that is expected to fit; see Note [Peaks of measured layouts]."""
        none_fits = self.num_failed > 0 and self.num_measured == 0
        if none_fits and self.clock.is_last_measurement:
            return min(simulated, key=self.peak_ratios.expected_bytes)
        return self.peak_ratios.first_that_fits(simulated, self.limits.memory_bytes)

    def _may_measure(self) -> bool:
        has_some = self.num_measured > 0 or self.num_failed > 0
        if has_some and self.clock.is_over(1.0):
            self.result.is_out_of_time = True
            return False
        most_failed = MOST_FAILED * self.limits.most_measured
        return self.num_failed < most_failed and self.num_measured < self.limits.most_measured

    def _measure(self, entry: Simulated) -> None:
        """Measure a layout as a whole; it joins the best ones where it fits."""
        layout = entry.layout
        if not self.costs.can_be_measured(layout):
            self.result.rejected[DEEP] += 1
            return
        self.report(f"measuring {layout.mesh}")
        begin_s = self.clock.elapsed_s
        simulated: Simulated | None = entry
        if self.limits.reorders:
            layout = self.costs.in_best_order(layout)
        if layout != entry.layout:
            simulated = None
            if any(layout == known.layout for known in self.result.best):
                return
        found = Found(layout, self.costs.predict(layout), simulated)
        self.clock.note(begin_s)
        self.peak_ratios.note(entry, found.peak_bytes)
        if found.peak_bytes > self.limits.memory_bytes:
            self.result.rejected[MEASURED] += 1
            self.num_failed += 1
            return
        self.num_measured += 1
        self.result.best.append(found)
