"""Owns the timeline: who did what, when. Simulator and profiler write it, one renderer draws it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from weft.schedule.actions import KIND_MEANING, Act

Origin = Literal["predicted", "measured"]
COMPUTE: frozenset[str] = frozenset(KIND_MEANING)
"""Kinds of spans that are actions of a table; such a span is named by its action."""


class Span(NamedTuple):
    """One thing that one rank did from `start_s` to `end_s`.

    `kind` is the action's (F, B, I, W), or any other word: "all_reduce", "send". Times may be `Fraction`s where a
    simulation is to be exact.
    """

    rank: int
    name: str
    kind: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """What `num_ranks` ranks did; `origin` says whether somebody measured it or the simulator predicts it."""

    spans: tuple[Span, ...]
    num_ranks: int
    origin: Origin

    def only(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[str] | None = None,
        start_s: float | None = None,
        end_s: float | None = None,
    ) -> Timeline:
        """The spans of these ranks and kinds that overlap the window; ranks keep their numbers."""
        spans = tuple(
            span for span in self.spans
            if (ranks is None or span.rank in ranks)
            and (kinds is None or span.kind in kinds)
            and (start_s is None or span.end_s > start_s)
            and (end_s is None or span.start_s < end_s)
        )  # fmt: skip
        return replace(self, spans=spans)

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, by their start."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in sorted(self.spans, key=lambda span: (span.start_s, span.end_s)):
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    def actions(self, rank: int) -> tuple[Act, ...]:
        """What `rank` computed, in order: a row of the table that was played."""
        return tuple(Act.parse(span.name) for span in self.by_rank[rank] if span.kind in COMPUTE)

    def to_json(self) -> str:
        """The JSON that `from_json` reads back; exact times become floats."""
        spans = [(*span[:3], float(span.start_s), float(span.end_s)) for span in self.spans]
        return json.dumps({"origin": self.origin, "num_ranks": self.num_ranks, "spans": spans})

    @staticmethod
    def from_json(text: str) -> Timeline:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        return Timeline(tuple(Span(*span) for span in data["spans"]), data["num_ranks"], data["origin"])


def makespan(timeline: Timeline) -> float:
    """Seconds from the first start to the last end; 0 for an empty timeline."""
    if not timeline.spans:
        return 0.0
    return max(span.end_s for span in timeline.spans) - min(span.start_s for span in timeline.spans)


def busy(timeline: Timeline) -> tuple[float, ...]:
    """Seconds that each rank spends in at least one span."""
    return tuple(map(_covered, timeline.by_rank))


def _covered(spans: Iterable[Span]) -> float:
    """Length of the union of `spans`, which come by their start."""
    total: float = 0
    reached: float | None = None
    for span in spans:
        start = span.start_s if reached is None else max(span.start_s, reached)
        total += max(span.end_s - start, 0)
        reached = max(span.end_s, start)
    return total


def idle(timeline: Timeline) -> tuple[float, ...]:
    """Seconds of the makespan in which each rank computes nothing."""
    whole = makespan(timeline)
    return tuple(whole - seconds for seconds in busy(timeline.only(kinds=COMPUTE)))


def bubble(timeline: Timeline) -> float:
    """Idle share of all rank-seconds, 0 to 1, as in Huang et al. 2019 (GPipe), section 2.3.

    Narayanan et al. 2021 divide by the ideal time instead: their (p-1)/m is this bubble b as b / (1 - b).
    """
    whole = makespan(timeline) * timeline.num_ranks
    return sum(idle(timeline)) / whole if whole else 0.0
