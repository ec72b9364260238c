"""What a search of layouts has found: measured layouts, simulated ones, the Pareto front, and why others were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from weft.parallel.pp import AXIS as PP
from weft.planner.simulate.predict import Prediction
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_costs import Bound, Simulated

Target = Literal["time", "memory", "cost"]
STATES, ACTIVATIONS, SIMULATED_PEAK, MEASURED = (
    "do not fit: parameters, gradients and optimizer states",
    "do not fit: with the activations in flight",
    "do not fit: simulated peak",
    "do not fit: measured peak",
)
SLOWER, SIMULATED_SLOWER, DEEP, OPEN = (
    "worse, by a lower bound",
    "simulated; worse than those that were measured",
    "simulated; stages are too deep to be measured",
    "not simulated; the limit of seconds has ended that",
)


@dataclass(frozen=True)
class Found:
    """A layout that fits, and its prediction.

    Attributes:
        simulated: the same by its simulation, which decided that it was measured; None without one.
    """

    layout: Layout
    prediction: Prediction
    simulated: Simulated | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.prediction.step.total_s

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return self.prediction.peak_bytes


@dataclass
class FoundLayouts:
    """What a search has found.

    Attributes:
        best: layouts that fit, best first.
        front: of those that were measured, the fastest for each amount of memory, fastest first.
        simulated_front: the same of those that were simulated and not measured.
        rejected: numbers of candidates by reason.
        num_candidates: legal layouts.
        next_bound: lower bound of the target (seconds or bytes) of the layouts that were neither
            measured nor simulated; None: there are none, or all are worse than the best.
        next_simulated: the best simulated one of those that were not measured.
        fitting_simulated: the best one of these whose simulated peak fits.
        num_bounded: candidates that have a bound from the costs of their own blocks.
        num_unbounded: candidates that have no bound; the limit of seconds has ended that.
        num_simulated: candidates whose step was simulated.
        is_out_of_time: whether the limit of seconds ended the search.
        smallest: the candidate with the least memory by its bound, where none fits.
    """

    num_candidates: int
    target: Target = "time"
    best: list[Found] = field(default_factory=list)
    front: list[Found] = field(default_factory=list)
    simulated_front: list[Simulated] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    next_bound: float | None = None
    next_simulated: Simulated | None = None
    fitting_simulated: Simulated | None = None
    num_bounded: int = 0
    num_unbounded: int = 0
    num_simulated: int = 0
    is_out_of_time: bool = False
    smallest: tuple[float, Layout] | None = None

    def value(self, entry: Found | Simulated | Bound) -> float:
        """What the target makes least: seconds, or bytes."""
        return entry.peak_bytes if self.target == "memory" else entry.seconds

    def order(self, entry: Found | Simulated) -> tuple[object, ...]:
        """Sorts layouts: the best of the target first."""
        return by_memory(entry) if self.target == "memory" else by_time(entry)

    @property
    def headline(self) -> Found | Simulated:
        """The best layout that fits, measured or not; some were measured."""
        simulated = self.fitting_simulated
        if simulated is None or self.order(self.best[0]) <= self.order(simulated):
            return self.best[0]
        return simulated

    @property
    def share_looked_at(self) -> float:
        """Of the legal layouts, those that were measured, simulated, or left out by a bound."""
        return 1 - self.rejected[OPEN] / self.num_candidates

    @property
    def is_proven(self) -> bool:
        """Whether no layout that was not measured can be better than the best one, by its bound."""
        if not self.best or self.rejected[DEEP] or self.num_unbounded:
            return False
        return self.next_bound is None or self.next_bound >= self.value(self.best[0])

    @property
    def largest_error(self) -> float:
        """Of the simulated seconds of measured layouts, as a share of the measured ones."""
        errors = [0.0]
        errors.extend(
            abs(entry.simulated.seconds / entry.seconds - 1)
            for entry in self.best
            if entry.simulated is not None
        )
        return max(errors)


class PeakRatios:
    """Measured peaks as multiples of simulated ones, by pipeline and recomputation."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[object, ...], float] = {}

    @staticmethod
    def _key(layout: Layout) -> tuple[object, ...]:
        return layout.degree(PP), layout.schedule, layout.chunks, layout.recompute

    def note(self, simulated: Simulated, measured_bytes: float) -> None:
        """A layout with this simulation was measured."""
        key = self._key(simulated.layout)
        ratio = measured_bytes / simulated.peak_bytes
        self._ratios[key] = max(ratio, self._ratios.get(key, 1.0))

    def expected_bytes(self, entry: Simulated) -> float:
        """The peak to expect of a simulated layout: larger where one like it was larger."""
        return entry.peak_bytes * self._ratios.get(self._key(entry.layout), 1.0)

    def first_that_fits(self, entries: Sequence[Simulated], memory_bytes: float) -> Simulated:
        """The first entry whose expected peak is within these bytes, or the first of all."""
        for entry in entries:
            if self.expected_bytes(entry) <= memory_bytes:
                return entry
        return entries[0]


Entry = TypeVar("Entry", bound=Found | Simulated)


def pareto_front(entries: Iterable[Entry]) -> list[Entry]:
    """The entries than which none is both faster and smaller, fastest first."""
    front: list[Entry] = []
    for entry in sorted(entries, key=by_time):
        if not front or entry.peak_bytes < front[-1].peak_bytes:
            front.append(entry)
    return front


def thinned_front(front: Sequence[Simulated], most: int) -> list[Simulated]:
    """So many entries of a front, at equal steps of memory between its ends."""
    if len(front) <= most:
        return list(front)
    first = front[0].peak_bytes
    last = front[-1].peak_bytes
    num_steps = max(1, most - 1)
    chosen: list[Simulated] = []
    for place in range(most):
        aim = first + (last - first) * place / num_steps
        distances = [abs(entry.peak_bytes - aim) for entry in front]
        nearest = front[distances.index(min(distances))]
        if nearest not in chosen:
            chosen.append(nearest)
    return chosen


def by_time(entry: Found | Simulated) -> tuple[object, ...]:
    """Sorts layouts: the fastest first."""
    return entry.seconds, entry.peak_bytes, entry.layout.order


def by_memory(entry: Found | Simulated) -> tuple[object, ...]:
    """Sorts layouts: the smallest first."""
    return entry.peak_bytes, entry.seconds, entry.layout.order
