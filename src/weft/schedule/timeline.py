"""Timelines: which rank ran what, when. Written by the simulator and by profilers, drawn by view/text.py and view/svg.py."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from weft.schedule.actions import KIND_MEANING, Act

Origin = Literal["predicted", "measured"]
TimeUnit = Literal["s", "units"]
"""Seconds, or units of a table of costs (a forward is 1 unit)."""

KERNELS = "kernels"
"""The lane of what a rank computes."""

COMPUTE: frozenset[str] = frozenset(KIND_MEANING)
"""Kinds of spans that are actions of a table; such a span is named by its action."""


class Span(NamedTuple):
    """One thing that one rank did from `start` to `end`, in the unit of its timeline.

    `kind` is the action's (F, B, I, W), or any other word: "all_reduce", "send". `lane` is what
    was busy: the kernels of the rank, or a communicator. Times are `Fraction`s in exact
    simulations.
    """

    rank: int
    name: str
    kind: str
    start: float
    end: float
    lane: str = KERNELS

    @property
    def duration(self) -> float:
        """Length in the unit of the timeline."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """What `num_ranks` ranks did.

    Attributes:
        origin: "measured" by a profiler, or "predicted" by the simulator.
        unit: of the times of all spans.
    """

    spans: tuple[Span, ...]
    num_ranks: int
    origin: Origin
    unit: TimeUnit = "s"

    def only(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[str] | None = None,
        start: float | None = None,
        end: float | None = None,
    ) -> Timeline:
        """The spans of these ranks and kinds that overlap the window; ranks keep their numbers."""

        spans: Iterable[Span] = self.spans
        if ranks is not None:
            spans = [span for span in spans if span.rank in ranks]
        if kinds is not None:
            spans = [span for span in spans if span.kind in kinds]
        if start is not None:
            spans = [span for span in spans if span.end > start]
        if end is not None:
            spans = [span for span in spans if span.start < end]
        return replace(self, spans=tuple(spans))

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, by their start."""

        def by_start(span: Span) -> tuple[float, float]:
            return span.start, span.end

        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in sorted(self.spans, key=by_start):
            row = rows[span.rank]
            row.append(span)
        return tuple(map(tuple, rows))

    def actions(self, rank: int) -> tuple[Act, ...]:
        """What `rank` computed, in order: its row of the table."""
        return tuple(Act.parse(span.name) for span in self.by_rank[rank] if span.kind in COMPUTE)

    def to_json(self) -> str:
        """The JSON that `from_json` reads back; exact times become floats."""
        spans: list[Span] = []
        for span in self.spans:
            start = float(span.start)
            end = float(span.end)
            spans.append(span._replace(start=start, end=end))
        fields = {
            "origin": self.origin,
            "unit": self.unit,
            "num_ranks": self.num_ranks,
            "spans": spans,
        }
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        return Timeline(
            spans=tuple(Span(*span) for span in fields["spans"]),
            num_ranks=fields["num_ranks"],
            origin=fields["origin"],
            unit=fields["unit"],
        )


def lanes_of(timeline: Timeline, rank: int) -> list[str]:
    """The lanes of a rank, kernels first."""
    spans = timeline.by_rank[rank]
    found = {span.lane for span in spans}
    found.discard(KERNELS)
    return [KERNELS, *sorted(found)]


def makespan(timeline: Timeline) -> float:
    """Time from the first start to the last end; 0 for an empty timeline."""
    if not timeline.spans:
        return 0.0
    first_start = min(span.start for span in timeline.spans)
    last_end = max(span.end for span in timeline.spans)
    return last_end - first_start


def busy(timeline: Timeline) -> tuple[float, ...]:
    """Time that each rank spends in at least one span."""
    return tuple(map(_union_length, timeline.by_rank))


def _union_length(spans: Iterable[Span]) -> float:
    """Length of the union of `spans`, which are ordered by their start."""
    total: float = 0
    covered_until: float | None = None
    for span in spans:
        start = span.start
        if covered_until is not None:
            # what overlaps counts once
            start = max(start, covered_until)
        covered_until = max(span.end, start)
        total += covered_until - start
    return total


def idle(timeline: Timeline) -> tuple[float, ...]:
    """Time of the makespan in which each rank computes nothing."""
    total = makespan(timeline)
    # the makespan is that of all spans: a rank that waits for a message at the end is idle
    computing = timeline.only(kinds=COMPUTE)
    return tuple(total - rank_busy for rank_busy in busy(computing))


def bubble(timeline: Timeline) -> float:
    """Idle share of all rank-time, 0 to 1, as in Huang et al. 2019 (GPipe), section 2.3.

    Narayanan et al. 2021 divide by the ideal time instead: their (p-1)/m is this bubble b as b / (1
    - b).
    """
    rank_time = makespan(timeline) * timeline.num_ranks
    if not rank_time:
        return 0.0
    return sum(idle(timeline)) / rank_time
