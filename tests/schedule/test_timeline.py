"""Timelines: busy and idle time, makespan and bubble of spans."""

from fractions import Fraction

import pytest

from weft.schedule.catalog import SCHEDULES, make_table
from weft.schedule.simulate import simulate, unit_cost
from weft.schedule.timeline import COMPUTE, Span, Timeline, bubble, busy, idle, makespan

MEASURED = Timeline(
    (
        Span(0, "F0.0", "F", 10.0, 11.0),
        Span(0, "all_reduce dp", "all_reduce", 10.5, 12.5),
        Span(0, "B0.0", "B", 13.0, 15.0),
        Span(1, "all_reduce dp", "all_reduce", 11.0, 12.0),
    ),
    num_ranks=2,
    origin="measured",
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_actions_of_a_simulated_timeline_are_the_rows_of_the_table(name):
    table = make_table(name, ranks=4, microbatches=8)
    timeline = simulate(table)
    assert tuple(timeline.actions(rank) for rank in range(4)) == table.rows


def test_json_reads_back_and_exact_times_become_floats():
    assert Timeline.from_json(MEASURED.to_json()) == MEASURED
    table = make_table("1f1b", ranks=2, microbatches=2)
    exact = simulate(table, lambda act: Fraction(unit_cost(act), 4))
    actual = Timeline.from_json(exact.to_json())
    expected = simulate(table, lambda act: unit_cost(act) / 4)
    assert actual == expected


def test_time_in_overlapping_spans_counts_once():
    assert busy(MEASURED) == (4.5, 1.0)
    assert makespan(MEASURED) == 5.0


def test_idle_and_bubble_look_at_computation_alone():
    assert idle(MEASURED) == (2.0, 5.0)
    assert bubble(MEASURED) == 0.7


def test_only_keeps_what_overlaps_the_window():
    names = [span.name for span in MEASURED.only(ranks={0}, kinds=COMPUTE).spans]
    assert names == ["F0.0", "B0.0"]
    assert [span.name for span in MEASURED.only(start=11.0, end=13.0).spans] == [
        "all_reduce dp",
        "all_reduce dp",
    ]
    assert MEASURED.only(kinds=()).num_ranks == 2


def test_an_empty_timeline_has_no_bubble():
    empty = Timeline((), num_ranks=2, origin="measured")
    assert makespan(empty) == 0
    assert busy(empty) == (0, 0)
    assert idle(empty) == (0, 0)
    assert bubble(empty) == 0
