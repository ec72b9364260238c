"""Greedy split-backward tables under memory limits: each rank runs the best action that can start, by several rules."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from weft.schedule.actions import Act, Kind, Table
from weft.schedule.search.program import KINDS, SchedulingProblem


class Rule(NamedTuple):
    """How a rank chooses.

    Attributes:
        waits: kinds that are not started when they would end after the arrival of another input.
        order: kinds, the most urgent first.
        cap: most activations that rank r of p holds: "limit", "falling" (p - r micro-batches), or
            "double" (2 (p - r) - 1).
        deep_first: among forwards of a rank that of the latest stage goes first.
    """

    waits: frozenset[Kind]
    order: tuple[Kind, ...]
    cap: str
    deep_first: bool


WAITS: tuple[frozenset[Kind], ...] = (frozenset(), frozenset({"W"}), frozenset({"F", "W"}))
ORDERS: tuple[tuple[Kind, ...], ...] = (("I", "F", "W"), ("F", "I", "W"))
CAPS = ("limit", "falling", "double")
RULES: tuple[Rule, ...] = tuple(
    Rule(
        waits,
        order,
        cap,
        deep_first,
    )
    for waits, order, cap, deep_first in itertools.product(
        WAITS,
        ORDERS,
        CAPS,
        (True, False),
    )
)


def greedy_tables(problem: SchedulingProblem, *, deadline_s: float) -> Iterator[Table]:
    """A table within the limits by each rule, until the deadline (`time.monotonic`); at least one."""
    is_first = True
    for rule in RULES:
        if time.monotonic() > deadline_s and not is_first:
            return
        is_first = False
        yield _GreedyTable(problem, rule).table()


@dataclass(frozen=True)
class _Candidate:
    """The next action of a kind on a stage, and when it can start."""

    act: Act
    start: int


class _GreedyTable:
    """A table under construction: actions are placed in the order of their start."""

    def __init__(self, problem: SchedulingProblem, rule: Rule) -> None:
        self.problem = problem
        self.rule = rule
        ranks = range(problem.num_ranks)
        self.owned = tuple(map(problem.stages, ranks))
        self.caps = tuple(map(self._cap, ranks))
        self.free_at = [0 for _ in ranks]
        self.held = [0 for _ in ranks]
        self.rows: list[list[Act]] = [[] for _ in ranks]
        self.arrivals: dict[Kind, list[list[int]]] = {}
        self.started: dict[Kind, list[int]] = {}
        for kind in KINDS:
            self.arrivals[kind] = [[] for _ in range(problem.num_stages)]
            self.started[kind] = [0] * problem.num_stages
        self.arrivals["F"][0] = [0] * problem.microbatches

    def table(self) -> Table:
        """Place all actions."""
        num_actions = len(KINDS) * self.problem.num_stages * self.problem.microbatches
        for _ in range(num_actions):
            choices = map(self._best_of_rank, range(self.problem.num_ranks))
            possible = [choice for choice in choices if choice is not None]
            assert possible, "a rank may always run its oldest micro-batch"
            earliest = min(possible, key=lambda choice: choice.start)
            self._place(earliest)
        return Table.of_rows(
            self.rows,
            stage_to_rank=self.problem.stage_to_rank,
            microbatches=self.problem.microbatches,
        )

    def _cap(self, rank: int) -> int:
        limit = self.problem.limits[rank]
        num_owned = len(self.owned[rank])
        ranks_behind = self.problem.num_ranks - rank
        caps = {"falling": ranks_behind, "double": 2 * ranks_behind - 1}
        if self.rule.cap not in caps:
            return limit
        return min(limit, num_owned * caps[self.rule.cap])

    def _best_of_rank(self, rank: int) -> _Candidate | None:
        candidates = list(self._candidates(rank))
        if not candidates:
            return None
        first_start = min(candidate.start for candidate in candidates)
        ready = [candidate for candidate in candidates if candidate.start == first_start]
        best = min(ready, key=self._urgency)
        if best.act.kind not in self.rule.waits:
            return best
        end = best.start + self._duration(best.act)
        urgent: list[_Candidate] = []
        for other in candidates:
            arrives_before_end = first_start < other.start < end
            if arrives_before_end and self._urgency(other) < self._urgency(best):
                urgent.append(other)
        return min(urgent, key=lambda other: other.start, default=best)

    def _candidates(self, rank: int) -> Iterator[_Candidate]:
        """The next action of every kind and stage of a rank whose input has a known arrival."""
        for kind in KINDS:
            for stage in self.owned[rank]:
                mb = self.started[kind][stage]
                arrivals = self.arrivals[kind][stage]
                has_arrived = mb < len(arrivals)
                if not has_arrived:
                    continue
                if kind == "F" and not self._has_room(rank, stage):
                    continue
                start = max(self.free_at[rank], arrivals[mb])
                yield _Candidate(Act(kind, stage, mb), start)

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether the rank may hold one more activation, and still run a micro-batch through its
        later stages.
        """
        num_later = sum(other > stage for other in self.owned[rank])
        return self.held[rank] + 1 + num_later <= self.caps[rank]

    def _urgency(self, candidate: _Candidate) -> tuple[int, int]:
        kind = candidate.act.kind
        stage = candidate.act.stage
        place = self.rule.order.index(kind)
        if kind == "F" and self.rule.deep_first:
            return place, -stage
        return place, stage

    def _duration(self, act: Act) -> int:
        return self.problem.durations[act.kind][act.stage]

    def _place(self, choice: _Candidate) -> None:
        kind, stage, _ = choice.act
        rank = self.problem.stage_to_rank[stage]
        end = choice.start + self._duration(choice.act)
        self.rows[rank].append(choice.act)
        self.free_at[rank] = end
        self.started[kind][stage] += 1
        if kind == "F":
            self.held[rank] += 1
            self._arrive(
                "F",
                stage,
                stage + 1,
                end,
            )
        elif kind == "I":
            self.arrivals["W"][stage].append(end)
            self._arrive(
                "I",
                stage,
                stage - 1,
                end,
            )
        else:
            self.held[rank] -= 1

    def _arrive(
        self,
        kind: Kind,
        stage: int,
        other: int,
        end: int,
    ) -> None:
        """Note when the output of a stage arrives at the next one; behind the last stage the
        backward begins.
        """
        if other == self.problem.num_stages:
            self.arrivals["I"][stage].append(end)
        elif other >= 0:
            hop = self.problem.hop(stage, other)
            self.arrivals[kind][other].append(end + hop)
