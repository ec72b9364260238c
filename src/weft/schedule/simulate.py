"""Schedule simulator: a table, a cost for each action and a delay for each transfer give a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

from weft.schedule.actions import Act, Kind, Table
from weft.schedule.timeline import Span, Timeline, TimeUnit
from weft.schedule.validate_table import linearize

Cost = Callable[[Act], float]
"""Time that an action takes, in the unit of the timeline."""

Hop = Callable[[Act, Act], float]
"""Time from the end of a producer to the moment its consumer on another rank may start."""

UNIT_COSTS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Unit costs: a backward does two matrix products for the forward's one, and splits into halves."""

ACTIVATION_CHANGE: Mapping[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
"""What an action adds to the number of activations that its rank holds."""


class Interval(NamedTuple):
    """When an action runs."""

    start: float
    end: float


def unit_cost(act: Act) -> float:
    """Forward 1 unit, backward 2 units (1 for each half of a split backward)."""
    return UNIT_COSTS[act.kind]


def action_times(table: Table, cost: Cost, *, hop: Hop | float = 0) -> dict[Act, Interval]:
    """When each action runs: it starts when its rank is free and everything it needs has arrived.

    A hop delays and never queues: links have unlimited bandwidth. Only +, - and max are used, so
    `Fraction`s stay exact.

    Raises:
        ScheduleError: when the table deadlocks.
    """
    times: dict[Act, Interval] = {}
    free_at: list[float] = [0] * table.num_ranks
    for act in linearize(table):
        rank = table.stage_to_rank[act.stage]
        start = free_at[rank]
        for need in table.needs(act):
            arrival = times[need].end
            crosses_ranks = table.stage_to_rank[need.stage] != rank
            if crosses_ranks:
                arrival += hop(need, act) if callable(hop) else hop
            start = max(start, arrival)
        end = start + cost(act)
        free_at[rank] = end
        times[act] = Interval(start, end)
    return times


def simulate(
    table: Table, cost: Cost = unit_cost, *, hop: Hop | float = 0, unit: TimeUnit = "units"
) -> Timeline:
    """The predicted timeline of `table`; spans are ordered by start.

    Args:
        cost: time of each action, in `unit`; default: `unit_cost`.
        hop: delay of a transfer between ranks, in `unit`.
        unit: "s" where the costs are seconds.

    Raises:
        ScheduleError: when the table deadlocks.
    """
    spans = []
    for act, interval in action_times(table, cost, hop=hop).items():
        rank = table.stage_to_rank[act.stage]
        spans.append(Span(rank, str(act), act.kind, interval.start, interval.end))
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(tuple(spans), table.num_ranks, "predicted", unit)


def peak_activations(row: Iterable[Act]) -> int:
    """Most activations that a row of actions holds at once: F stores one, B or W frees it."""
    held = peak = 0
    for act in row:
        held += ACTIVATION_CHANGE[act.kind]
        peak = max(peak, held)
    return peak


def peak_live(table: Table) -> tuple[int, ...]:
    """For each rank the most activations of one (stage, micro-batch) that it holds at once."""
    return tuple(peak_activations(row) for row in table.rows)


def peak_microbatches(table: Table) -> tuple[Fraction, ...]:
    """`peak_live` in micro-batches through all stages of the rank: with v chunks a rank, a chunk
    counts 1/v.
    """
    peaks = []
    for rank, row in enumerate(table.rows):
        num_chunks = len(table.stages(rank))
        peaks.append(Fraction(peak_activations(row), num_chunks))
    return tuple(peaks)
