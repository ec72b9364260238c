"""The engine that plays rows of steps, one row a rank: which rank goes on, who waits for whom, and when each action runs.

Note [One engine]
    `RankRows.advance` has no clock. Every rank goes along its row until a step lacks something; what
    that can be, and who goes on together, is the reader's to say: a table (`validate_table`), a
    program whose transfers block (`lower.check_rendezvous`), collectives of a world (the planner).
    A rank that could go on stays able to: nothing that another one does takes it back. So the
    places at which ranks stop do not depend on the order in which they are tried.

    `play` gives times along a known order of a table's actions. How long an action takes and when
    its tensor arrives is the reader's to say: units and hops (`simulate`), seconds of stages,
    recorded regions, or many random draws at once (the planner).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from weft.schedule.actions import Act, Table

Step = TypeVar("Step")
Time = TypeVar("Time")


@dataclass(frozen=True)
class BlockedRank(Generic[Step]):
    """A rank that cannot go on.

    Attributes:
        place: of the step in the rank's row.
        lacks: what the step waits for.
    """

    rank: int
    place: int
    step: Step
    lacks: Sequence[Any]


class RankRows(Generic[Step]):
    """Rows of steps, and how far each rank has come.

    Attributes:
        rows: by rank.
        places: by rank, of its next step.
    """

    def __init__(self, rows: Mapping[int, Sequence[Step]]) -> None:
        self.rows = rows
        self.places = dict.fromkeys(rows, 0)
        self._runnable = deque(rows)
        self._sleeping: dict[Hashable, list[int]] = {}

    def head(self, rank: int) -> Step | None:
        """The step that a rank is at; None behind its last one."""
        row = self.rows[rank]
        place = self.places[rank]
        return row[place] if place < len(row) else None

    def advance(
        self, attempt: Callable[[int, Step], Sequence[Any]]
    ) -> tuple[BlockedRank[Step], ...]:
        """Let all ranks go on until each has ended or waits; the ranks that wait. () is no deadlock.

        Args:
            attempt: called with a rank and the step that it is at; does the step and gives (), or
                gives what it lacks. The rank is tried again when the first of it happens (`wake`)
                and when another rank takes it along.
        """
        while self._runnable:
            rank = self._runnable.popleft()
            row = self.rows[rank]
            while (place := self.places[rank]) < len(row):
                # `attempt` may wake ranks or take them along; they run when this one waits.
                lacks = attempt(rank, row[place])
                if lacks:
                    # at the first thing that is lacking: whether the others are there is asked when it has happened
                    self._sleeping.setdefault(lacks[0], []).append(rank)
                    break
                self.places[rank] += 1
        return tuple(
            BlockedRank(rank, self.places[rank], step, attempt(rank, step))
            for rank in self.rows
            if (step := self.head(rank)) is not None
        )

    def wake(self, event: Hashable) -> None:
        """Try the ranks again that lack this."""
        if event in self._sleeping:
            self._runnable.extend(self._sleeping.pop(event))

    def take_along(self, rank: int) -> None:
        """Another rank goes on behind its step, too."""
        self.places[rank] += 1
        self._runnable.append(rank)


@dataclass(frozen=True)
class PlayOrder:
    """Actions of a table in an order in which each comes behind those that it needs; lists by place.

    Attributes:
        ranks: of each action.
        source_of: place of the action of another rank whose tensor it uses, or -1.
        consumer_of: place of the action of another rank that uses its tensor, or -1.
    """

    table: Table
    acts: tuple[Act, ...]
    ranks: tuple[int, ...]
    source_of: tuple[int, ...]
    consumer_of: tuple[int, ...]

    @staticmethod
    def of(table: Table, sources: Mapping[Act, Act | None]) -> PlayOrder:
        """The order of these actions; of each, the one of another stage that it needs."""
        ranks = tuple(map(table.rank_of, sources))
        places = {act: place for place, act in enumerate(sources)}
        source_of = [-1] * len(ranks)
        consumer_of = [-1] * len(ranks)
        for place, source in enumerate(sources.values()):
            # stages of one rank hand tensors on without a message
            if source is not None and ranks[places[source]] != ranks[place]:
                source_of[place] = places[source]
                consumer_of[places[source]] = place
        return PlayOrder(table, tuple(sources), ranks, tuple(source_of), tuple(consumer_of))

    def sorted_by(self, keys: Sequence[Any]) -> PlayOrder:
        """The same actions, by ascending keys; there is one for each place."""
        before = sorted(range(len(keys)), key=keys.__getitem__)
        place_of = {place: number for number, place in enumerate(before)}
        # where there is no such action there is none in the new order, either
        place_of[-1] = -1
        return PlayOrder(
            table=self.table,
            acts=tuple([self.acts[place] for place in before]),
            ranks=tuple([self.ranks[place] for place in before]),
            source_of=tuple([place_of[self.source_of[place]] for place in before]),
            consumer_of=tuple([place_of[self.consumer_of[place]] for place in before]),
        )


def play(
    order: PlayOrder,
    run: Callable[[int, Time], Time],
    send: Callable[[int, Time], Time],
    *,
    free_at: MutableSequence[Time],
    latest: Callable[[Time, Time], Time],
) -> None:
    """Play all actions: each starts when its rank is free and the tensor that it uses has arrived.

    Args:
        run: from the place of an action and its start to its end.
        send: from the place of an action whose tensor another rank uses, and its end, to the
            arrival; may keep the rank longer in `free_at`.
        free_at: by rank, when it begins; afterwards, when it is free.
        latest: the later of two times.
    """
    arrivals: dict[int, Time] = {}
    places = zip(order.ranks, order.source_of, order.consumer_of, strict=True)
    for place, (rank, source, consumer) in enumerate(places):
        start = free_at[rank]
        if source >= 0:
            # A tensor has one consumer; as columns of draws, its arrival is too large to be kept.
            start = latest(start, arrivals.pop(source))
        end = free_at[rank] = run(place, start)
        # Now, not when the consumer comes: a message may begin when its receiver is free next.
        if consumer >= 0:
            arrivals[place] = send(place, end)
