"""Schedule simulator: a table, a cost for each action and a delay for each transfer give a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from weft.schedule.actions import Act, Kind, Table
from weft.schedule.engine import PlayOrder, play
from weft.schedule.timeline import Span, Timeline, TimeUnit
from weft.schedule.validate_table import play_order

Cost = Callable[[Act], float]
"""Time that an action takes, in the unit of the timeline."""

Hop = Callable[[Act, Act], float]
"""Time from the end of a producer to the moment its consumer on another rank may start."""

UNIT_COSTS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Unit costs: a backward does two matrix products for the forward's one, and splits into halves."""

ACTIVATION_CHANGE: Mapping[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
"""What an action adds to the number of activations that its rank holds."""


class ActionInterval(NamedTuple):
    """When an action runs."""

    start: float
    end: float


def unit_cost(act: Act) -> float:
    """Forward 1 unit, backward 2 units (1 for each half of a split backward)."""
    return UNIT_COSTS[act.kind]


def action_times(table: Table, cost: Cost, *, hop: Hop | float = 0) -> dict[Act, ActionInterval]:
    """When each action runs: it starts when its rank is free and everything it needs has arrived.

    A hop delays and never queues: links have unlimited bandwidth. Only +, - and max are used, so
    `Fraction`s stay exact.

    Raises:
        ScheduleError: when the table deadlocks.
    """
    order = play_order(table)
    return dict(zip(order.acts, intervals(order, cost, hop=hop), strict=True))


def intervals(order: PlayOrder, cost: Cost, *, hop: Hop | float = 0) -> list[ActionInterval]:
    """`action_times` by the place of an action in an order of a table's actions."""
    acts = order.acts
    found: list[ActionInterval] = []

    def run(place: int, start: float) -> float:
        end = start + cost(acts[place])
        found.append(ActionInterval(start, end))
        return end

    def send(place: int, end: float) -> float:
        return end + (hop(acts[place], acts[order.consumer_of[place]]) if callable(hop) else hop)

    free_at: list[float] = [0] * order.table.num_ranks
    play(order, run, send, free_at=free_at, latest=max)
    return found


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
    times = action_times(table, cost, hop=hop)
    spans = [
        Span(table.rank_of(act), str(act), act.kind, interval.start, interval.end)
        for act, interval in times.items()
    ]
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(tuple(spans), num_ranks=table.num_ranks, origin="predicted", unit=unit)


def peak_activations(row: Iterable[Act]) -> int:
    """Most activations that a row of actions holds at once: F stores one, B or W frees it."""
    return max(accumulate((ACTIVATION_CHANGE[act.kind] for act in row), initial=0))


def peak_live(table: Table) -> tuple[int, ...]:
    """For each rank the most activations of one (stage, micro-batch) that it holds at once."""
    return tuple(peak_activations(row) for row in table.rows)


def peak_microbatches(table: Table) -> tuple[Fraction, ...]:
    """`peak_live` in micro-batches through all stages of the rank: with v chunks a rank, a chunk
    counts 1/v.
    """
    peaks = enumerate(peak_live(table))
    return tuple(Fraction(peak, len(table.stages(rank))) for rank, peak in peaks)
