"""The engine against simulations that know nothing of it: time tick by tick, and meetings one at a time."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.random_table import random_table
from weft.errors import ScheduleError
from weft.schedule.actions import Act, Table
from weft.schedule.engine import PlayOrder, RankRows
from weft.schedule.simulate import action_times
from weft.schedule.validate_table import linearize, play_order

DICE = st.randoms(use_true_random=False)


def maybe_deadlocking(dice: random.Random) -> Table:
    """A random table, some of whose actions have changed places with others of their row."""
    ranks = dice.randint(1, 4)
    stages = ranks + dice.randint(0, 2)
    table = random_table(dice, ranks=ranks, stages=stages, microbatches=dice.randint(1, 3))
    rows = [list(row) for row in table.rows]
    for _ in range(dice.randint(0, 3)):
        row = dice.choice(rows)
        place = dice.randrange(len(row))
        row.insert(dice.randrange(len(row)), row.pop(place))
    return Table.of_rows(rows, stage_to_rank=table.stage_to_rank, microbatches=table.microbatches)


def tick_by_tick(
    table: Table, cost: dict[Act, int], hop: dict[Act, int]
) -> tuple[dict[Act, tuple[int, int]], dict[int, Act]]:
    """When each action runs, and at which action each rank stands when nothing happens any more.

    At every tick a rank that is free starts its next action, if all that it needs has arrived.
    """
    times: dict[Act, tuple[int, int]] = {}
    rest = {rank: list(row) for rank, row in enumerate(table.rows)}
    free_at = dict.fromkeys(rest, 0)
    longest = sum(cost.values()) + sum(hop.values())
    for now in range(longest + 1):
        for rank, row in rest.items():
            if not row or free_at[rank] > now:
                continue
            arrivals = []
            for need in table.needs(row[0]):
                _, end = times.get(need, (0, longest + 1))
                crosses = table.rank_of(need) != rank
                arrivals.append(end + hop[need] if crosses else end)
            if all(arrival <= now for arrival in arrivals):
                act = row.pop(0)
                free_at[rank] = now + cost[act]
                times[act] = (now, free_at[rank])
    return times, {rank: row[0] for rank, row in rest.items() if row}


@settings(max_examples=150)
@given(DICE)
def test_actions_run_as_tick_by_tick_and_a_deadlock_names_where_each_rank_stands(dice):
    table = maybe_deadlocking(dice)
    cost = {act: dice.randint(1, 4) for act in table.actions}
    hop = {act: dice.randint(0, 3) for act in table.actions}
    times, blocked = tick_by_tick(table, cost, hop)
    if not blocked:
        assert action_times(table, cost.__getitem__, hop=lambda act, _: hop[act]) == times
        return
    with pytest.raises(ScheduleError) as caught:
        action_times(table, cost.__getitem__)
    (fault,) = caught.value.faults
    lines = str(fault.got).split("; ")
    assert [line.partition(" and waits for ")[0] for line in lines] == [
        f"rank {rank} is at {act}" for rank, act in blocked.items()
    ]
    for line, act in zip(lines, blocked.values(), strict=True):
        need = Act.parse(line.partition(" and waits for ")[2].partition(" ")[0])
        assert need in table.needs(act)
        assert need not in times
        rank = table.rank_of(need)
        assert f"(rank {rank} is at {blocked[rank]})" in line


@given(DICE)
def test_an_order_that_is_sorted_anew_keeps_who_uses_whose_tensor(dice):
    table = random_table(dice, ranks=3, stages=4, microbatches=2)
    order = play_order(table)
    assert order.acts == linearize(table)
    times = action_times(table, lambda act: Fraction(act.stage + 1, 3), hop=Fraction(1, 7))
    again = order.sorted_by([(times[act].end, table.rank_of(act)) for act in order.acts])
    sources = {act: table.source(act) for act in again.acts}
    assert again == PlayOrder.of(table, sources)
    for place, act in enumerate(again.acts):
        source = again.source_of[place]
        if source >= 0:
            assert again.acts[source] == table.source(act)
            assert again.consumer_of[source] == place
            assert again.ranks[source] != again.ranks[place] == table.rank_of(act)


def meetings(dice: random.Random) -> dict[int, list[tuple[int, ...]]]:
    """Rows of meetings, each a step of all its members; in some rows two have changed places."""
    ranks = dice.randint(2, 5)
    rows: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in range(ranks)}
    for _ in range(dice.randint(1, 8)):
        members = tuple(sorted(dice.sample(range(ranks), dice.randint(1, ranks))))
        for rank in members:
            rows[rank].append(members)
    for row in rows.values():
        if len(row) > 1 and dice.random() < 0.3:
            place = dice.randrange(len(row) - 1)
            row[place], row[place + 1] = row[place + 1], row[place]
    return rows


@settings(max_examples=150)
@given(DICE)
def test_ranks_that_meet_stop_where_no_meeting_is_complete(dice):
    rows = meetings(dice)
    rest = {rank: list(row) for rank, row in rows.items()}
    while True:
        heads = {rank: row[0] for rank, row in rest.items() if row}
        complete = [
            group for group in set(heads.values()) if all(heads.get(m) == group for m in group)
        ]
        if not complete:
            break
        for member in dice.choice(sorted(complete)):
            rest[member].pop(0)
    ranks = RankRows(rows)

    def attempt(rank: int, group: tuple[int, ...]) -> list[int]:
        absent = [member for member in group if ranks.head(member) != group]
        if not absent:
            for member in group:
                if member != rank:
                    ranks.take_along(member)
        return absent

    waiting = ranks.advance(attempt)
    assert {each.rank: list(rows[each.rank][each.place :]) for each in waiting} == {
        rank: row for rank, row in rest.items() if row
    }
    for each in waiting:
        assert each.step == heads[each.rank]
        assert each.lacks == [m for m in each.step if heads.get(m) != each.step]
