"""Greedy split-backward tables under memory limits: each rank runs the best action that can start, by several rules."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.schedule.actions import Act, Kind, Table
from weft_plan.schedule_search.program import KINDS, SchedulingProblem


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

    def urgency(self, act: Act) -> tuple[int, int]:
        """Sorts actions that can start: the most urgent first."""
        place = self.order.index(act.kind)
        if act.kind == "F" and self.deep_first:
            return place, -act.stage
        return place, act.stage


@dataclass
class _StageProgress:
    """Actions of one kind on a stage.

    Attributes:
        arrivals: of the inputs of its micro-batches so far.
        started: how many have started.
    """

    arrivals: list[int] = field(default_factory=list)
    started: int = 0


@dataclass
class _RankProgress:
    """A rank of a table under construction.

    Attributes:
        stages: of the rank.
        cap: most activations that it holds.
        free_at: end of its last action.
        held: activations now.
        row: actions so far.
    """

    stages: tuple[int, ...]
    cap: int
    free_at: int = 0
    held: int = 0
    row: list[Act] = field(default_factory=list)

    def has_room(self, stage: int) -> bool:
        """Whether the rank may hold one more activation, and still run a micro-batch through its
        later stages.
        """
        num_later = sum(other > stage for other in self.stages)
        num_held = self.held + 1 + num_later
        return num_held <= self.cap


WAITS: tuple[frozenset[Kind], ...] = (frozenset(), frozenset({"W"}), frozenset({"F", "W"}))
ORDERS: tuple[tuple[Kind, ...], ...] = (("I", "F", "W"), ("F", "I", "W"))
CAPS = ("limit", "falling", "double")
RULES: tuple[Rule, ...] = tuple(
    Rule(waits, order, cap, deep_first)
    for waits, order, cap, deep_first in itertools.product(WAITS, ORDERS, CAPS, (True, False))
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
    """A table under construction: actions are placed in the order of their start.

    The engine plays tables that are there; here the next action of a rank is chosen. Arrivals are
    put down as actions are placed: asking `needs` for every candidate takes twice the time.
    """

    def __init__(self, problem: SchedulingProblem, rule: Rule) -> None:
        self.problem = problem
        self.rule = rule
        self.ranks: list[_RankProgress] = []
        for rank in range(problem.num_ranks):
            self.ranks.append(self._new_rank(rank))
        self.progress: dict[Kind, list[_StageProgress]] = {}
        for kind in KINDS:
            stages = range(problem.num_stages)
            self.progress[kind] = [_StageProgress() for _ in stages]
        first = self.progress["F"][0]
        first.arrivals = [0] * problem.microbatches

    def _new_rank(self, rank: int) -> _RankProgress:
        stages = self.problem.stages(rank)
        ranks_behind = self.problem.num_ranks - rank
        most_of_rule = {"falling": ranks_behind, "double": 2 * ranks_behind - 1}
        cap = self.problem.limits[rank]
        most = most_of_rule.get(self.rule.cap)
        if most is not None:
            cap = min(cap, len(stages) * most)
        return _RankProgress(stages, cap)

    def table(self) -> Table:
        """Place all actions."""
        num_actions = len(KINDS) * self.problem.num_stages * self.problem.microbatches
        for _ in range(num_actions):
            possible = []
            for rank in self.ranks:
                choice = self._best_of_rank(rank)
                if choice is not None:
                    possible.append(choice)
            assert possible, "a rank may always run its oldest micro-batch"
            earliest = min(possible, key=lambda choice: choice.start)
            self._place(earliest)
        return Table.of_rows(
            [rank.row for rank in self.ranks],
            stage_to_rank=self.problem.stage_to_rank,
            microbatches=self.problem.microbatches,
        )

    def _best_of_rank(self, rank: _RankProgress) -> _Candidate | None:
        """The action that the rule starts next on a rank; None if no input has arrived."""
        candidates = list(self._candidates(rank))
        if not candidates:
            return None
        first_start = min(candidate.start for candidate in candidates)
        ready = [candidate for candidate in candidates if candidate.start == first_start]
        best = min(ready, key=self._urgency)
        if best.act.kind not in self.rule.waits:
            return best
        end = best.start + self._duration(best.act)
        urgent = []
        for other in candidates:
            arrives_before_end = first_start < other.start < end
            if arrives_before_end and self._urgency(other) < self._urgency(best):
                urgent.append(other)
        return min(urgent, key=lambda other: other.start, default=best)

    def _urgency(self, candidate: _Candidate) -> tuple[int, int]:
        return self.rule.urgency(candidate.act)

    def _candidates(self, rank: _RankProgress) -> Iterator[_Candidate]:
        """The next action of every kind and stage of a rank whose input has a known arrival."""
        for kind in KINDS:
            for stage in rank.stages:
                progress = self.progress[kind][stage]
                mb = progress.started
                has_arrived = mb < len(progress.arrivals)
                if not has_arrived:
                    continue
                if kind == "F" and not rank.has_room(stage):
                    continue
                start = max(rank.free_at, progress.arrivals[mb])
                yield _Candidate(Act(kind, stage, mb), start)

    def _duration(self, act: Act) -> int:
        return self.problem.durations[act.kind][act.stage]

    def _place(self, choice: _Candidate) -> None:
        act = choice.act
        stage = act.stage
        rank = self.ranks[self.problem.stage_to_rank[stage]]
        end = choice.start + self._duration(act)
        rank.row.append(act)
        rank.free_at = end
        self.progress[act.kind][stage].started += 1
        if act.kind == "F":
            rank.held += 1
            self._arrive("F", stage, stage + 1, end)
        elif act.kind == "I":
            weight_grads = self.progress["W"][stage]
            weight_grads.arrivals.append(end)
            self._arrive("I", stage, stage - 1, end)
        else:
            rank.held -= 1

    def _arrive(self, kind: Kind, stage: int, other: int, end: int) -> None:
        """Note when the output of a stage arrives at the next one; behind the last stage the
        backward begins.
        """
        if other == self.problem.num_stages:
            input_grads = self.progress["I"][stage]
            input_grads.arrivals.append(end)
        elif other >= 0:
            hop = self.problem.hop(stage, other)
            receiver = self.progress[kind][other]
            receiver.arrivals.append(end + hop)
