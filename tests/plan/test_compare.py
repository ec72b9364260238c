"""Comparison of schedules: figures against the closed forms of the papers, and costs given as text."""

from __future__ import annotations

from fractions import Fraction

import pytest

from weft.errors import ScheduleError
from weft.schedule.catalog import SCHEDULES, make_table
from weft.schedule.costs import ScheduleCosts
from weft.schedule.lower import Send, lower
from weft_plan.schedule_search.compare import ScheduleFigures, accepting, compare

SIZES = [(2, 4), (4, 8), (4, 12), (3, 9)]


def figures(name: str, p: int, m: int, *words: str, chunks: int | None = None) -> ScheduleFigures:
    costs = ScheduleCosts.parse(words)
    (found,) = compare([name], costs, ranks=p, microbatches=m, chunks=chunks)
    return found


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_makespans_and_bubbles_are_those_of_the_papers(p: int, m: int) -> None:
    """F + B = 3 units of a rank and micro-batch; chunks do not change the work of a rank."""
    start_up = p - 1
    makespans = {
        ("gpipe", None): 3 * (m + start_up),
        ("1f1b", None): 3 * (m + start_up),
        ("interleaved", 2): 3 * (m + Fraction(start_up, 2)),
        ("interleaved", 4): 3 * (m + Fraction(start_up, 4)),
        ("zero_bubble", None): 3 * m + start_up,
        ("zero_bubble_h2", None): 3 * m + start_up,
        ("zbv", None): 3 * m + Fraction(start_up, 2),
        ("dual_pipe_v", None): 3 * m + Fraction(start_up, 2),
    }
    for (name, chunks), makespan in makespans.items():
        found = figures(name, p, m, chunks=chunks)
        assert found.makespan == makespan, name
        assert found.bubble == 1 - Fraction(3 * m) / makespan, name


@pytest.mark.parametrize(("f", "i", "w"), [(2, 3, 2), (4, 5, 3), (1, 1, 1)])
def test_other_costs_follow_the_closed_forms_too(f: int, i: int, w: int) -> None:
    """1F1B (p-1)(F+B), interleaved that / v, ZB-H1 (p-1)(F+B-2W), on top of m (F+B)."""
    p, m = 4, 8
    words = (f"F={f}", f"I={i}", f"W={w}")
    of_one = f + i + w
    work = m * of_one
    plain = figures("1f1b", p, m, *words)
    assert plain.makespan - work == (p - 1) * of_one
    interleaved = figures("interleaved", p, m, *words, chunks=2)
    fraction = Fraction((p - 1) * of_one, 2)
    assert interleaved.makespan - work == fraction
    zero_bubble = figures("zero_bubble", p, m, *words)
    expected = (p - 1) * (of_one - 2 * w)
    assert zero_bubble.makespan - work == expected


def test_held_activations_count_a_chunk_as_its_share() -> None:
    p, m = 4, 8
    held = figures("gpipe", p, m).held
    assert held == (m,) * p
    assert figures("1f1b", p, m).held == (4, 3, 2, 1)
    held = figures("zbv", p, m).held
    assert held == (p,) * p
    held = figures("interleaved", p, m).held[0]
    assert held == p + Fraction(p - 1, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_are_the_sends_of_the_lowered_table(name: str) -> None:
    found = figures(name, 4, 8)
    sends = []
    for row in lower(found.table).rows:
        sends += [instruction for instruction in row if isinstance(instruction, Send)]
    assert found.num_messages == len(sends)


def test_messages_of_one_chunk_cross_every_boundary_twice_and_a_v_turns_on_its_rank() -> None:
    p, m = 4, 8
    num_messages = figures("1f1b", p, m).num_messages
    assert num_messages == 2 * m * (p - 1)
    num_messages = figures("interleaved", p, m, chunks=3).num_messages
    expected = 2 * m * (3 * p - 1)
    assert num_messages == expected
    num_messages = figures("zbv", p, m).num_messages
    expected = 2 * m * (2 * p - 2)
    assert num_messages == expected


def test_a_message_takes_time_on_the_way_out_and_back() -> None:
    costs = ScheduleCosts.parse(["F=1", "B=2"], message="0.25")
    (found,) = compare(["gpipe"], costs, ranks=4, microbatches=1)
    assert found.makespan == 12 + Fraction(6, 4)


@pytest.mark.parametrize(
    ("words", "times"),
    [
        ((), (1, 1, 1)),
        (("F=2", "B=3"), (2, 1.5, 1.5)),
        (("F=1", "I=1.2", "W=0.8"), (1, Fraction(6, 5), Fraction(4, 5))),
        (("F=1", "B=1", "W=1"), (1, 1, 1)),
    ],
)
def test_costs_are_read_exactly(words: tuple[str, ...], times: tuple[float, ...]) -> None:
    costs = ScheduleCosts.parse(words)
    actual = (costs.forward[0], costs.input_grad[0], costs.weight_grad[0])
    assert actual == times


@pytest.mark.parametrize(
    "words",
    [
        ("F",),
        ("F=",),
        ("F=1",),
        ("F=1", "F=2", "B=1"),
        ("F=1", "B=1", "I=1"),
        ("X=1",),
        ("F=-1", "B=1"),
        ("F=nan", "B=1"),
        ("F=1e9", "B=1"),
        ("F=9999999", "B=1"),
        ("F=0", "B=1"),
        ("F=1..2", "B=1"),
    ],
)
def test_costs_that_cannot_be_read_are_rejected(words: tuple[str, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"^costs: "):
        ScheduleCosts.parse(words)


def test_one_time_a_stage_needs_as_many_as_there_are_stages() -> None:
    costs = ScheduleCosts.parse(["F=1,2,1,1", "B=2"])
    table = make_table("1f1b", ranks=4, microbatches=4)
    makespan = ScheduleFigures("1f1b", table, costs).makespan
    assert makespan > figures("1f1b", 4, 4).makespan
    with pytest.raises(ScheduleError, match="4 times; need 1, or 8"):
        costs.of_stages(num_stages=8, chunks=2)


def test_chunks_are_for_the_schedules_that_accept_them() -> None:
    found = compare(["1f1b", "interleaved"], ScheduleCosts(), ranks=2, microbatches=4, chunks=3)
    assert [each.chunks for each in found] == [1, 3]
    with pytest.raises(ScheduleError, match="no schedule of the comparison"):
        compare(["1f1b", "zbv"], ScheduleCosts(), ranks=2, microbatches=4, chunks=3)


def test_a_schedule_that_does_not_accept_the_sizes_is_named() -> None:
    with pytest.raises(ScheduleError, match="interleaved needs"):
        compare(["1f1b", "interleaved"], ScheduleCosts(), ranks=4, microbatches=6)
    assert "interleaved" not in set(accepting(ranks=4, microbatches=6))
    assert "1f1b" in set(accepting(ranks=4, microbatches=6))
