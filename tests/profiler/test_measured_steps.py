"""Accounts, bubble, critical path and slow ranks of recorded steps: exact for the records of a simulated schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profiler.simulated_records import STEP, UPDATE_S, simulated_steps
from weft.profiler.clocks import Round, offset_between
from weft.profiler.critical_path import critical_path, work_on_path
from weft.profiler.measured_timeline import measured_timeline
from weft.schedule.catalog import make_table
from weft.schedule.simulate import simulate
from weft.schedule.timeline import COMPUTE, bubble, makespan

NAMES = st.sampled_from(["gpipe", "1f1b", "zero_bubble"])
ROUNDING = 1e-9


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(2, 4), st.integers(1, 6), st.sampled_from([0.0, 0.25]))
def test_the_bubble_and_the_actions_are_those_of_the_schedule(
    name: str, ranks: int, microbatches: int, hop: float
) -> None:
    table = make_table(name, ranks=ranks, microbatches=microbatches)
    steps = simulated_steps(table, hop=hop)
    expected = simulate(table, hop=hop)
    assert steps.numbers == (STEP,)
    assert steps.bubble(STEP) == pytest.approx(float(bubble(expected)), abs=ROUNDING)
    drawn = measured_timeline(steps, (STEP,), table).only(kinds=COMPUTE)
    shown = {(span.rank, span.name): (span.start, span.end) for span in drawn.spans}
    for span in expected.spans:
        assert shown[span.rank, span.name] == pytest.approx((span.start, span.end))


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(2, 4), st.integers(1, 6), st.integers(0, 3), st.floats(1.0, 5.0))
def test_busy_waiting_and_communication_add_up_to_the_step(
    name: str, ranks: int, microbatches: int, slow: int, factor: float
) -> None:
    table = make_table(name, ranks=ranks, microbatches=microbatches)
    steps = simulated_steps(table, hop=0.25, slow={slow: factor})
    for rank in range(ranks):
        account = steps.account(rank, STEP)
        assert account.busy_s + account.waiting_s + account.communication_s == pytest.approx(
            account.length
        )
        assert sum(account.waited_for.values()) == pytest.approx(account.waiting_s)
        actions = sum(each.duration for each in steps.actions[rank])
        assert account.busy_s == pytest.approx(actions + UPDATE_S)


@settings(max_examples=40, deadline=None)
@given(NAMES, st.integers(2, 4), st.integers(1, 6), st.integers(0, 3), st.floats(1.0, 5.0))
def test_the_critical_path_covers_the_step_and_has_no_gap(
    name: str, ranks: int, microbatches: int, slow: int, factor: float
) -> None:
    table = make_table(name, ranks=ranks, microbatches=microbatches)
    steps = simulated_steps(table, slow={slow: factor})
    path = critical_path(steps, STEP)
    assert path.length == pytest.approx(steps.step_s(STEP))
    for before, after in pairwise(path.pieces):
        assert before.end == pytest.approx(after.start)
    assert sum(work_on_path(steps, path).values()) == pytest.approx(path.length)
    # Messages take no time here, so what the ranks do on the path is all of it.
    assert sum(path.by_rank.values()) == pytest.approx(path.length)


def test_the_slow_rank_is_what_the_path_runs_through() -> None:
    table = make_table("1f1b", ranks=4, microbatches=8)
    steps = simulated_steps(table, slow={2: 3.0})
    path = critical_path(steps, STEP)
    assert next(iter(path.by_rank)) == 2
    assert path.by_rank[2] > 0.8 * path.length


def test_phases_of_a_rank_follow_each_other() -> None:
    table = make_table("1f1b", ranks=2, microbatches=4)
    steps = simulated_steps(table)
    for phases in steps.phases:
        for before, after in pairwise(phases):
            assert before.end == after.start
    timeline = measured_timeline(steps, (STEP,), table)
    assert makespan(timeline) == pytest.approx(steps.step_s(STEP))


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.1)), min_size=1, max_size=20),
    st.data(),
)
def test_the_offset_of_a_clock_lies_within_its_error(
    offset: float, rounds: list[tuple[float, float]], data: st.DataObject
) -> None:
    first, other = [], []
    now = 0.0
    for own_s, their_s in rounds:
        own, theirs = now + own_s, now + their_s
        joined = max(own, theirs)
        delays = data.draw(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)))
        first.append(Round(own, joined + delays[0]))
        other.append(Round(theirs + offset, joined + delays[1] + offset))
        now = joined + 1
    found = offset_between(first, other)
    assert abs(found.seconds - offset) <= found.error_s + 1e-6
