"""Schedules with split backwards against the closed forms of their papers, exactly; F, I, W times, B = I + W.

A rank's own idle time lies between its first and its last action; the papers of ZB-H2 and ZB-V
count that. The makespan has the slant on top: rank r cannot start before r forwards are through.
"""

import itertools
from functools import cache

import pytest

from tests.schedule.sizes import MICROBATCHES
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import make_table
from weft.schedule.simulate import action_times, peak_live, peak_microbatches
from weft.schedule.validate_table import validate

SPLIT = ("zero_bubble", "zero_bubble_h2", "zbv", "dual_pipe_v")
COSTS = tuple((f, i, w) for f, i, w in itertools.product((4, 5, 6, 7), repeat=3) if w <= min(f, i))
"""F, I, W with W no longer than the others."""
SOME = ((2, 4), (3, 7), (4, 8), (5, 12), (6, 12))
"""p, m with m >= 2p."""


@pytest.fixture(scope="module", params=MICROBATCHES)
def sizes(request):
    """Ranks and micro-batches."""
    return tuple(itertools.product(range(1, 9), request.param))


@cache
def table(name: str, p: int, m: int) -> Table:
    return make_table(name, ranks=p, microbatches=m)


def cost(f: int, i: int, w: int):
    """Whole numbers: exact."""
    return {"F": f, "I": i, "W": w, "B": i + w}.__getitem__


@cache
def spans(name: str, p: int, m: int, times=(1, 1, 1)) -> list[list[tuple[int, int]]]:
    """Start and end of every action, row by row."""
    price = cost(*times)
    played = table(name, p, m)
    when = action_times(played, lambda act: price(act.kind))
    rows = []
    for row in played.rows:
        rows.append([when[act] for act in row])
    return rows


def length(name: str, p: int, m: int, times=(1, 1, 1)) -> int:
    """Idle time of a rank over the makespan; the work is the same on every rank."""
    num_stages = len(table(name, p, m).stage_to_rank)
    chunks = num_stages // p
    work = m * sum(times) * chunks
    ends = []
    for row in spans(name, p, m, times):
        ends.append(row[-1][1])
    return max(ends) - work


def own_idle(name: str, p: int, m: int, times=(1, 1, 1)) -> tuple[int, ...]:
    """Idle time of each rank between its first and its last action."""
    found = []
    for row in spans(name, p, m, times):
        first_start, _ = row[0]
        _, last_end = row[-1]
        busy = sum(end - start for start, end in row)
        found.append(last_end - first_start - busy)
    return tuple(found)


@pytest.mark.parametrize("name", SPLIT)
def test_every_size_makes_a_valid_table(name, sizes):
    for p, m in sizes:
        validate(table(name, p, m))


def test_zb_h1_idles_a_third_of_1f1b(sizes):
    """(p-1)(F+B-2W) = p-1 where F = I = W; below p micro-batches one more for each that lacks."""
    for p, m in sizes:
        missing = max(p - m, 0)
        assert length("zero_bubble", p, m) == p - 1 + missing, (p, m)
        assert length("1f1b", p, m) == 3 * (p - 1)


def test_zb_h1_idles_as_its_paper_says_for_every_ratio_of_times():
    for (p, m), times in itertools.product(SOME, COSTS):
        f, i, w = times
        backward = i + w
        expected = (p - 1) * (f + backward - 2 * w)
        assert length("zero_bubble", p, m, times) == expected, (p, m, times)


def test_zb_h1_pays_for_weight_gradients_that_are_longer_than_the_other_parts():
    """The paper's formula would be 0 here."""
    assert length("zero_bubble", 4, 8, (2, 2, 4)) == 3 * 2


def test_zb_h1_holds_p_micro_batches_on_every_rank(sizes):
    for p, m in sizes:
        actual = peak_live(table("zero_bubble", p, m))
        assert actual == (min(p, m),) * p


def test_zb_h2_idles_never_between_its_first_and_its_last_action(sizes):
    """(p-1)(F+B-3W) = 0 where F = I = W and m >= 2p-1; below, one for each micro-batch that lacks."""
    for p, m in sizes:
        largest = max(own_idle("zero_bubble_h2", p, m))
        expected = max(2 * p - 1 - m, 0)
        assert largest == expected, (p, m)
        if m >= 2 * p - 1:
            assert length("zero_bubble_h2", p, m) == p - 1, (
                "the slant: the last rank starts p-1 forwards late"
            )


def test_zb_h2_idles_as_its_paper_says_for_every_ratio_of_times():
    for (p, m), times in itertools.product(SOME, COSTS):
        f, i, w = times
        backward = i + w
        expected = (p - 1) * (f + backward - 3 * w)
        idle = own_idle("zero_bubble_h2", p, m, times)
        assert max(idle) == expected, (p, m, times)


def test_zb_h2_holds_2p_minus_1_micro_batches(sizes):
    for p, m in sizes:
        actual = peak_live(table("zero_bubble_h2", p, m))
        expected = (min(2 * p - 1, m),) * p
        assert actual == expected


def test_zb_v_idles_never_between_its_first_and_its_last_action(sizes):
    """0 where F = I = W and m >= 2p-1; below, two for each micro-batch that lacks."""
    for p, m in sizes:
        largest = max(own_idle("zbv", p, m))
        expected = 2 * max(2 * p - 1 - m, 0)
        assert largest == expected, (p, m)
        if m >= 2 * p - 1:
            assert length("zbv", p, m) == p - 1


def test_zb_v_idles_for_what_the_input_gradient_is_longer_than_the_weight_gradient():
    """2(p-1)(I-W) where W <= F <= I, times of a chunk."""
    for (p, m), (f, i, w) in itertools.product(SOME, COSTS):
        if f <= i:
            idle = own_idle("zbv", p, m, (f, i, w))
            expected = 2 * (p - 1) * (i - w)
            assert max(idle) == expected, (p, m, f, i, w)


def test_zb_v_holds_p_micro_batches_no_more_than_1f1b(sizes):
    for p, m in sizes:
        peak = peak_microbatches(table("zbv", p, m))
        assert max(peak) == min(p, m)
        if m >= 2 * p - 1:
            assert peak == (p,) * p
            assert max(peak) == max(peak_microbatches(table("1f1b", p, m)))


def test_dual_pipe_v_idles_as_zb_h1_when_pairs_run_one_after_the_other(sizes):
    """(p-1)(F+B-2W), times of a chunk, where F = I >= W and m >= 2p: what our player does."""
    for p, m in sizes:
        if m >= 2 * p:
            assert length("dual_pipe_v", p, m) == max(own_idle("dual_pipe_v", p, m)) == p - 1, (
                p,
                m,
            )
    for (p, m), (f, i, w) in itertools.product(SOME, COSTS):
        if f == i:
            assert length("dual_pipe_v", p, m, (f, i, w)) == (p - 1) * (f + (i + w) - 2 * w), (
                p,
                m,
                f,
                i,
                w,
            )


def test_dual_pipe_v_holds_2p_plus_1_chunks(sizes):
    for p, m in sizes:
        if m >= 2 * p:
            actual = peak_live(table("dual_pipe_v", p, m))
            assert actual == (2 * p + 1,) * p
        largest = max(peak_live(table("dual_pipe_v", p, m)))
        assert largest <= 2 * p + 1


def pairs(row: tuple[Act, ...]) -> list[tuple[Act, ...]]:
    """A forward and the backward right behind it, through the other chunk, are one."""
    groups = []
    rest = list(row)
    while rest:
        first, *_ = rest
        joined = (
            len(rest) > 1
            and first.kind == "F"
            and rest[1].kind == "B"
            and rest[1].stage != first.stage
        )
        groups.append(tuple(rest[: 1 + joined]))
        del rest[: 1 + joined]
    return groups


def longest_idle_in_pairs(played: Table, f: int, i: int, w: int, pair: int) -> int:
    """Most idle time of a rank where a pair starts when both its actions can, and both end `pair`
    later.
    """
    price = cost(f, i, w)
    todo = [pairs(row) for row in played.rows]
    ends: dict[Act, int] = {}
    clock = [0] * len(todo)
    busy = [0] * len(todo)

    def earliest(group: tuple[Act, ...]) -> int | None:
        """When all that the actions need is there; None while some of it has not run."""
        time = 0
        for act in group:
            for need in played.needs(act):
                if need not in ends:
                    return None
                time = max(time, ends[need])
        return time

    while any(todo):
        for rank, row in enumerate(todo):
            while row:
                group = row[0]
                ready = earliest(group)
                if ready is None:
                    break
                row.pop(0)
                took = pair if len(group) == 2 else price(group[0].kind)
                start = max(clock[rank], ready)
                clock[rank] = start + took
                busy[rank] += took
                for act in group:
                    ends[act] = clock[rank]
    return max(clock) - min(busy)


@pytest.mark.parametrize("pair", [18, 20, 24, 27])
def test_dual_pipe_v_idles_as_its_authors_say_when_a_pair_is_one(pair):
    """(PP/2-1)(F&B+B-3W) with PP = 2p stages: F = I = 9, W = 9 or 7; F&B from B (all hidden) to F +
    B (nothing hidden).
    """
    for (p, m), w in itertools.product(SOME, (7, 9)):
        if pair <= 9 + 9 + w:
            played = table("dual_pipe_v", p, m)
            idle = longest_idle_in_pairs(played, 9, 9, w, pair)
            expected = (p - 1) * (pair + (9 + w) - 3 * w)
            assert idle == expected, (p, m, w)


def test_dual_pipe_v_is_pairs_in_its_steady_state():
    for p, m in SOME:
        for rank, row in enumerate(table("dual_pipe_v", p, m).rows):
            count = sum(len(group) == 2 for group in pairs(row))
            expected = 2 * (m - 2 * p + rank + 1) + (p - 1 - rank)
            assert count == expected


@pytest.mark.parametrize("name", ["zbv", "dual_pipe_v"])
def test_a_v_has_its_first_and_last_stage_on_rank_0_and_turns_on_the_last_rank(name):
    for p in range(1, 9):
        expected_stage_to_rank = tuple(min(stage, 2 * p - 1 - stage) for stage in range(2 * p))
        assert table(name, p, 2 * p).stage_to_rank == expected_stage_to_rank


@pytest.mark.parametrize("name", ["zbv", "dual_pipe_v"])
def test_on_rank_0_of_a_v_the_first_stage_is_the_last_to_be_done(name, sizes):
    """A parameter that embedding and head share is complete with stage 0."""
    for p, m in sizes:
        backwards = [act for act in table(name, p, m).rows[0] if act.kind in ("B", "W")]
        actual = backwards[-1].stage
        assert actual == 0
