"""Owns the simulator: a table, a cost for each action and a delay for each hop make a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import accumulate

from weft.schedule.actions import Act, Kind, Table, linearise
from weft.schedule.timeline import Span, Timeline

Cost = Callable[[Act], float]
"""Seconds an action takes."""

Hop = Callable[[Act, Act], float]
"""Seconds from the end of a producer to the moment its consumer on another rank may start."""

TEXTBOOK: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""The usual ratio: a backward does two matrix products for the forward's one, and splits into halves."""

OPENS: Mapping[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
"""What an action adds to the activations that its rank holds."""


def textbook_cost(act: Act) -> float:
    """Forward 1 s, backward 2 s."""
    return TEXTBOOK[act.kind]


def play_times(table: Table, cost: Cost, *, hop: Hop | float = 0) -> dict[Act, tuple[float, float]]:
    """Start and end of each action: it starts when its rank is free and all it needs has arrived.

    Hops delay and never queue: links are as wide as needed. Only +, - and max are used, so `Fraction`s stay exact.

    Raises:
        ScheduleError: when the table deadlocks.
    """
    delay: Hop = hop if callable(hop) else lambda _producer, _consumer: hop
    times: dict[Act, tuple[float, float]] = {}
    free: list[float] = [0] * table.num_ranks
    for act in linearise(table):
        rank = table.home[act.stage]
        start = free[rank]
        for need in table.needs(act):
            arrival = times[need][1]
            if table.home[need.stage] != rank:
                arrival += delay(need, act)
            start = max(start, arrival)
        free[rank] = start + cost(act)
        times[act] = start, free[rank]
    return times


def simulate(table: Table, cost: Cost = textbook_cost, *, hop: Hop | float = 0) -> Timeline:
    """The timeline that `table` has at these costs; spans are ordered by start.

    Raises:
        ScheduleError: when the table deadlocks.
    """
    spans = [
        Span(table.home[act.stage], str(act), act.kind, start, end)
        for act, (start, end) in play_times(table, cost, hop=hop).items()
    ]
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_s, span.rank))), table.num_ranks, "predicted")


def most_held(row: Iterable[Act]) -> int:
    """Most activations that a row of actions holds at once: F opens one, B or W closes it."""
    return max(accumulate(OPENS[act.kind] for act in row), default=0)


def peak_live(table: Table) -> tuple[int, ...]:
    """For each rank the most activations of one (stage, micro-batch) that it holds at once."""
    return tuple(map(most_held, table.rows))


def peak_microbatches(table: Table) -> tuple[Fraction, ...]:
    """`peak_live` in micro-batches through all stages of the rank: with v chunks, a chunk counts 1/v."""
    return tuple(Fraction(most_held(row), len(table.stages(rank))) for rank, row in enumerate(table.rows))
