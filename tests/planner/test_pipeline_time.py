"""Predicted times of pipeline actions: equal to the schedule simulator without collectives; messages computed by hand."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.random_table import random_table
from weft.parallel.pipeline.player import MAX_SENDS
from weft.planner.measure.played_actions import action_keys, played_microbatches, thinned
from weft.planner.simulate import pipeline_time
from weft.planner.simulate.pipeline_time import (
    ClassCosts,
    PipelineOrder,
    StageMessage,
    pipeline_order,
    play,
)
from weft.planner.simulate.region_costs import (
    CommOp,
    Compute,
    RegionCosts,
    Start,
    WaitForCarried,
    WaitForOwn,
)
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import SCHEDULES, make_table
from weft.schedule.lower import Program, Send, lower
from weft.schedule.simulate import UNIT_COSTS, action_times

SIZES = [("gpipe", 3, 1, 5), ("1f1b", 4, 1, 8), ("interleaved", 2, 3, 6), ("zero_bubble", 3, 1, 7)]
SIZES += [("zbv", 3, 2, 6), ("dual_pipe_v", 2, 2, 6)]


def computing(seconds: float) -> RegionCosts:
    return RegionCosts((Compute(seconds),), (), seconds, frozenset(), seconds)


def costs_of(
    order: PipelineOrder, *, kernels: float = 1.0, message: float = 0.0
) -> list[ClassCosts]:
    """Unit costs of every class, times `kernels`; messages of these seconds."""
    costs = []
    for action_class in order.classes:
        region = computing(kernels * UNIT_COSTS[action_class.key.kind])  # type: ignore[index]
        has_peer = action_class.peer is not None
        costs.append(ClassCosts(region, StageMessage("network", message) if has_peer else None))
    return costs


def table_of(name: str, ranks: int, chunks: int, microbatches: int) -> Table:
    return make_table(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_without_collectives_actions_run_as_in_the_schedule_simulator(hop: float) -> None:
    for size in SIZES:
        table = table_of(*size)
        order = pipeline_order(table)
        played = play(order, costs_of(order, message=hop))
        expected = action_times(table, lambda act: UNIT_COSTS[act.kind], hop=hop)
        for place, act in enumerate(order.acts):
            actual = (played.starts[place], played.ends[place])
            assert actual == expected[act], (size, act)


def test_a_rank_of_zero_bubble_h2_is_busy_from_its_first_to_its_last_action() -> None:
    """So a step takes 3 m where ranks go on without the global norm, and p - 1 more where they wait
    for it (Qi et al. 2023, section 4)."""
    ranks, microbatches = 4, 12
    order = pipeline_order(table_of("zero_bubble_h2", ranks, 1, microbatches))
    played = play(order, costs_of(order))
    windows = []
    for start, end in zip(played.first_start, played.last_end, strict=True):
        windows.append(end - start)
    assert windows == [3.0 * microbatches] * ranks
    assert max(played.last_end) == 3.0 * microbatches + ranks - 1


def test_a_message_begins_when_both_ends_have_come_to_it_and_the_pair_is_free() -> None:
    """Rank 0 forwards every second; messages of 3 s queue on their way to rank 1."""
    table = make_table("gpipe", ranks=2, microbatches=3)
    order = pipeline_order(table)
    played = play(order, costs_of(order, message=3.0))
    starts = dict(zip(order.acts, played.starts, strict=True))
    actual = [starts[Act("F", 1, mb)] for mb in range(3)]
    assert actual == [4.0, 7.0, 10.0]
    posted_late = Table.of_rows(
        [[Act("F", 0, 0), Act("B", 0, 0)], [Act("F", 1, 0), Act("B", 1, 0)]],
        stage_to_rank=(0, 1),
        microbatches=1,
    )
    order = pipeline_order(posted_late)
    played = play(order, costs_of(order, message=0.5), begin=2.0)
    assert played.starts == [2.0, 3.5, 4.5, 7.0]
    assert played.ready_at == [9.0, 7.0]


def test_before_one_more_message_a_rank_waits_for_the_oldest() -> None:
    table = make_table("gpipe", ranks=2, microbatches=MAX_SENDS + 3)
    order = pipeline_order(table)
    played = play(order, costs_of(order, message=10.0))
    starts = dict(zip(order.acts, played.starts, strict=True))
    waits = [starts[Act("F", 0, mb)] for mb in range(MAX_SENDS + 3)]
    assert waits[: MAX_SENDS + 1] == list(range(MAX_SENDS + 1))
    assert waits[MAX_SENDS + 1 :] == [11.0, 21.0]


def test_a_collective_of_one_action_is_waited_for_in_a_later_one() -> None:
    """The first backward starts a reduction of 3 s, which the last one waits for."""
    table = make_table("gpipe", ranks=1, microbatches=2)
    order = pipeline_order(table)
    reduction = CommOp("reduce_scatter", "dp", "dp", "network", 3.0)
    starts_it = (Compute(1.0), Start(0))
    first = RegionCosts(starts_it, (reduction,), 1.0, frozenset(["network"]), 1.0)
    waits_for_it = (Compute(1.0), WaitForCarried("dp"))
    last = RegionCosts(waits_for_it, (), 1.0, frozenset(), 1.0)
    backwards = {"first": first, "last": last}
    costs = []
    for action_class in order.classes:
        key = action_class.key
        if key.kind == "B":
            region = backwards[key.place]
        else:
            region = computing(1.0)
        costs.append(ClassCosts(region))
    played = play(order, costs)
    place = order.acts.index(table.rows[0][-1])
    assert played.starts[place] == 3.0
    assert played.ends[place] == 6.0
    assert played.times[-1].exposed == {"dp": 2.0}


def test_a_message_delays_a_collective_on_its_link_and_not_one_on_another() -> None:
    """Rank 0 sends F0.0 for 0.5 s while the collective of F0.1 would begin at once."""
    table = make_table("gpipe", ranks=2, microbatches=2)
    order = pipeline_order(table)
    for link, delay in (("node", 0.5), ("network", 0.0)):
        op = CommOp("all_reduce", "tp", "tp", "node", 1.0)
        steps = (Start(0), WaitForOwn(0))
        region = RegionCosts(steps, (op,), 0.0, frozenset(["node"]), 0.0)
        costs = []
        for action_class in order.classes:
            message = StageMessage(link, 0.5) if action_class.peer is not None else None  # type: ignore[arg-type]
            costs.append(ClassCosts(region, message))
        played = play(order, costs)
        ends = dict(zip(order.acts, played.ends, strict=True))
        assert ends[Act("F", 0, 1)] == 2.0 + delay, link


@settings(max_examples=40)
@given(
    st.sampled_from(SIZES),
    st.floats(0.1, 1.0),
    st.floats(0.1, 1.0),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_no_faster_kernel_or_message_makes_a_pipeline_longer(
    size: tuple[str, int, int, int], kernels: float, messages: float, hop: float
) -> None:
    order = pipeline_order(table_of(*size))
    before = play(order, costs_of(order, message=hop))
    costs = costs_of(order, kernels=kernels, message=hop * messages)
    now = play(order, costs)
    for end, earlier_end in zip(before.ends, now.ends, strict=True):
        assert earlier_end <= end * (1 + 1e-9)


def test_every_schedule_has_an_order_in_which_each_source_comes_first() -> None:
    for name, schedule in SCHEDULES.items():
        sizes = next(iter(schedule.sizes(ranks=3, chunks=2, microbatches=6)))
        order = pipeline_order(schedule.table(*sizes))
        for place, source in enumerate(order.source_of):
            assert source < place, name


def test_the_micro_batches_that_are_played_have_every_kind_of_action() -> None:
    """dual_pipe_v runs whole backwards on some micro-batches of a stage and split ones on others."""
    for name, microbatches in (("dual_pipe_v", 9), ("dual_pipe_v", 16), ("zbv", 9), ("1f1b", 9)):
        table = make_table(name, ranks=4, microbatches=microbatches)
        for row in range(table.num_ranks):
            played = thinned(table, played_microbatches(table, row))
            needed = set(action_keys(table, row).values())
            assert needed <= set(action_keys(played, row).values()), name


def test_few_micro_batches_are_played_of_a_long_deep_schedule() -> None:
    """Of 60 micro-batches at most 5 on each of 8 pipeline ranks, whose rows split other backwards."""
    table = make_table("dual_pipe_v", ranks=8, microbatches=60)
    for row in (0, 1, 6, 7):
        assert len(played_microbatches(table, row)) <= 5


def program_by_ticks(program: Program, *, message_s: int, most_sends: int) -> dict[Act, int]:
    """Starts of actions by the rules of Note [Messages between stages], one instruction and one
    tick of unit costs after the other.
    """
    starts: dict[Act, int] = {}
    rest = [list(row) for row in program.rows]
    free_at = [0 for _ in rest]
    sent: list[list[Act]] = [[] for _ in rest]
    posted: Counter[Act] = Counter()
    arrivals: dict[Act, int] = {}
    pairs: dict[tuple[int, int], list[Act]] = {}
    for row, instructions in enumerate(program.rows):
        for each in instructions:
            if isinstance(each, Send):
                pairs.setdefault((row, each.peer), []).append(each.act)

    def goes_on(rank: int, now: int) -> bool:
        """Whether a rank has done one more instruction at this time."""
        waits_for = sent[rank][: max(0, len(sent[rank]) - most_sends)]
        have_arrived = all(arrivals.get(act, now + 1) <= now for act in waits_for)
        if not rest[rank] or free_at[rank] > now or not have_arrived:
            return False
        instruction = rest[rank][0]
        if isinstance(instruction, Act):
            source = program.table.source(instruction)
            is_sent = source is not None and program.table.rank_of(source) != rank
            if is_sent and arrivals.get(source, now + 1) > now:  # type: ignore[arg-type]
                return False
            starts[instruction] = now
            free_at[rank] = now + UNIT_COSTS[instruction.kind]
        else:
            posted[instruction.act] += 1
            if isinstance(instruction, Send):
                sent[rank].append(instruction.act)
        rest[rank].pop(0)
        return True

    now = 0
    while any(rest):
        has_changed = True
        while has_changed:
            has_changed = any(goes_on(rank, now) for rank in range(len(rest)))
            for acts in pairs.values():
                under_way = [act for act in acts if arrivals.get(act, now + 1) > now]
                if under_way and under_way[0] not in arrivals and posted[under_way[0]] == 2:
                    arrivals[under_way[0]] = now + message_s
                    has_changed = True
        now += 1
    return starts


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(1, 3))
def test_a_pipeline_runs_as_in_a_simulation_tick_by_tick(
    dice: Random, message_s: int, most_sends: int
) -> None:
    ranks = dice.randint(1, 4)
    stages = ranks + dice.randint(0, 2)
    table = random_table(dice, ranks=ranks, stages=stages, microbatches=dice.randint(1, 4))
    expected = program_by_ticks(lower(table), message_s=message_s, most_sends=most_sends)
    order = pipeline_order(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_time, "MAX_SENDS", most_sends)
        played = play(order, costs_of(order, message=float(message_s)))
    assert dict(zip(order.acts, played.starts, strict=True)) == expected
