"""The simulator against the formulas of the papers, exactly."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.sizes import MICROBATCHES
from weft.errors import ScheduleError
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import SCHEDULES, make_table
from weft.schedule.simulate import action_times, peak_live, peak_microbatches, simulate, unit_cost
from weft.schedule.timeline import bubble, makespan

SIZES = {
    name: tuple(SCHEDULES[name].sizes(ranks=8, chunks=4, microbatches=32))
    for name in ("gpipe", "1f1b", "interleaved")
}
EVERY = [(name, *size) for name, sizes in SIZES.items() for size in sizes]


def exact(table: Table, chunks: int):
    """A stage of one rank costs 1 forward and 2 backward; a chunk is 1/chunks of it."""
    return simulate(table, lambda act: Fraction(unit_cost(act), chunks))


@pytest.mark.parametrize("microbatches", MICROBATCHES)
@pytest.mark.parametrize("name", SIZES)
def test_the_bubble_is_exactly_the_formula(name, microbatches):
    """(p-1)/(m+p-1) without chunks, ((p-1)/v)/(m+(p-1)/v) with: ranks <= 8, micro-batches <= 32,
    chunks <= 4.
    """
    chunks = (2, 3, 4) if name == "interleaved" else (1,)
    found = {(p, v) for p, v, _ in SIZES[name]}
    expected = set(itertools.product(range(1, 9), chunks))
    assert found == expected
    for p, v, m in SIZES[name]:
        if m not in microbatches:
            continue
        table = SCHEDULES[name].table(p, v, m)
        timeline = exact(table, v)
        start_up = Fraction(p - 1, v)
        whole = m + start_up
        assert makespan(timeline) == 3 * whole, (p, v, m)
        assert bubble(timeline) == start_up / whole, (p, v, m)


@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (2, 3), (5, 1)])
@pytest.mark.parametrize("name", SIZES)
def test_the_start_up_costs_p_minus_1_forwards_and_backwards_whatever_their_ratio(
    name, forward, backward
):
    for p, v, m in [(2, SCHEDULES[name].default_chunks, 4), (4, SCHEDULES[name].default_chunks, 8)]:
        table = SCHEDULES[name].table(p, v, m)
        timeline = simulate(table, lambda act: Fraction({"F": forward, "B": backward}[act.kind]))
        num_slots = m * v + p - 1
        assert makespan(timeline) == num_slots * (forward + backward)


def test_gpipe_holds_every_micro_batch():
    for p, v, m in SIZES["gpipe"]:
        actual = peak_live(SCHEDULES["gpipe"].table(p, v, m))
        assert actual == (m,) * p


def test_1f1b_holds_p_then_one_less_on_each_rank():
    for p, v, m in SIZES["1f1b"]:
        expected = tuple(min(m, p - rank) for rank in range(p))
        table = SCHEDULES["1f1b"].table(p, v, m)
        assert peak_live(table) == expected


def test_interleaved_holds_p_times_1_plus_p_minus_1_over_pv_micro_batches():
    for p, v, m in SIZES["interleaved"]:
        table = SCHEDULES["interleaved"].table(p, v, m)
        chunks = []
        for rank in range(p):
            warm_up = p * v + (p - 1) - 2 * rank
            chunks.append(min(m * v, warm_up))
        chunks = tuple(chunks)
        assert peak_live(table) == chunks
        assert peak_microbatches(table) == tuple(Fraction(count, v) for count in chunks)
        if m > p:
            fraction = Fraction(p - 1, p * v)
            expected = p * (1 + fraction)
            assert peak_microbatches(table)[0] == expected


def test_a_split_backward_frees_its_activation_only_with_the_weight_gradient():
    row = tuple(map(Act.parse, ["F0.0", "I0.0", "F0.1", "I0.1", "W0.0", "W0.1"]))
    table = Table((row,), stage_to_rank=(0,), microbatches=2)
    assert peak_live(table) == (2,)


def test_a_split_backward_lets_the_previous_stage_start_earlier():
    whole = Table.parse("microbatches 1\nstage_to_rank 0 1\nrank 0: F0.0 B0.0\nrank 1: F1.0 B1.0\n")
    split = Table.parse(
        "microbatches 1\nstage_to_rank 0 1\nrank 0: F0.0 I0.0 W0.0\nrank 1: F1.0 I1.0 W1.0\n"
    )
    assert makespan(simulate(whole)) == 6
    assert makespan(simulate(split)) == 5


def test_a_hop_delays_only_what_comes_from_another_rank():
    table = make_table("interleaved", ranks=1, microbatches=2, chunks=2)
    assert makespan(simulate(table, hop=100)) == makespan(simulate(table)) == 12
    assert (
        makespan(simulate(make_table("1f1b", ranks=2, microbatches=1), hop=10))
        == 1 + 10 + 3 + 10 + 2
    )


def test_a_hop_may_depend_on_the_transfer():
    hops = []

    def hop(producer, consumer):
        hops.append((str(producer), str(consumer)))
        return {"F": 1, "B": 5}[producer.kind]

    assert (
        makespan(simulate(make_table("1f1b", ranks=2, microbatches=1), hop=hop))
        == 1 + 1 + 3 + 5 + 2
    )
    assert hops == [("F0.0", "F1.0"), ("B1.0", "B0.0")]


@given(
    st.sampled_from([size for size in EVERY if size[1] * size[3] <= 64]),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_each_action_starts_as_soon_as_its_rank_and_all_it_needs_allow_and_no_sooner(
    size, hop, dice
):
    name, *sizes = size
    table = SCHEDULES[name].table(*sizes)
    cost = {act: dice.randint(1, 9) for row in table.rows for act in row}
    times = action_times(table, cost.__getitem__, hop=hop)
    for rank, row in enumerate(table.rows):
        end_of_rank = 0
        for act in row:
            earliest = end_of_rank
            for need in table.needs(act):
                _, arrival = times[need]
                if table.stage_to_rank[need.stage] != rank:
                    arrival += hop
                earliest = max(earliest, arrival)
            start, end = times[act]
            assert start == earliest
            assert end == start + cost[act]
            end_of_rank = end


def test_a_large_table_is_played_once_through():
    """16,384 actions: every one is priced once, and the whole takes well under a second."""
    table = make_table("interleaved", ranks=32, microbatches=64, chunks=4)
    priced = []

    def cost(act):
        priced.append(act)
        return unit_cost(act)

    timeline = simulate(table, cost)
    num_actions = 2 * 32 * 4 * 64
    assert len(priced) == len(set(priced)) == num_actions
    assert len(timeline.spans) == num_actions
    assert bubble(timeline) == pytest.approx((31 / 4) / (64 + 31 / 4), abs=1e-12)


def test_a_table_that_deadlocks_is_named_and_not_waited_for():
    table = Table.parse("microbatches 1\nstage_to_rank 0 1\nrank 0: B0.0 F0.0\nrank 1: F1.0 B1.0\n")
    with pytest.raises(ScheduleError, match=r"rank 0 is at B0\.0"):
        simulate(table)
