"""Tables of actions: dependencies, the faults that `validate` finds, and the text forms."""

import functools
import random
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.random_table import random_table
from tests.schedule.sizes import MICROBATCHES
from weft.errors import ScheduleError
from weft.schedule.actions import Act, Table, needs
from weft.schedule.catalog import SCHEDULES
from weft.schedule.validate_table import linearize, validate


@functools.cache
def tables() -> tuple[Table, ...]:
    """Tables of every schedule."""
    return tuple(
        schedule.table(*size)
        for schedule in SCHEDULES.values()
        for size in schedule.sizes(ranks=8, chunks=4, microbatches=32)
    )


@functools.cache
def small_tables() -> tuple[Table, ...]:
    """Those of at most 60 actions."""

    def num_actions(table: Table) -> int:
        return sum(len(row) for row in table.rows)

    return tuple(table for table in tables() if num_actions(table) <= 60)


def plays(table: Table) -> bool:
    """Whether a table is complete and ends: written apart from `needs`, by rounds, slow and plain."""
    if sorted(table.actions) != expected_actions(table):
        return False
    for rank, row in enumerate(table.rows):
        for act in row:
            if table.stage_to_rank[act.stage] != rank:
                return False
    forward = dict.fromkeys(range(table.microbatches), -1)
    backward = dict.fromkeys(range(table.microbatches), table.num_stages)
    rows = [list(row) for row in table.rows]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and _step(row[0], forward, backward):
                row.pop(0)
                moved = True
    return not any(rows)


def expected_actions(table: Table) -> list[Act]:
    """Every action that a table of these sizes must hold, sorted."""
    splits = set()
    for act in table.actions:
        if act.kind in "IW":
            splits.add((act.stage, act.mb))
    expected = []
    for stage, mb in product(range(table.num_stages), range(table.microbatches)):
        kinds = "FIW" if (stage, mb) in splits else "FB"
        expected.extend(Act(kind, stage, mb) for kind in kinds)
    return sorted(expected)


def _step(act: Act, forward: dict[int, int], backward: dict[int, int]) -> bool:
    """Each micro-batch climbs the stages forward, one at a time, then comes down; W only when it
    has come by.
    """
    if act.kind == "F":
        ready = forward[act.mb] == act.stage - 1
        forward[act.mb] += ready
        return ready
    if act.kind == "W":
        return backward[act.mb] <= act.stage
    is_next = backward[act.mb] == act.stage + 1
    ready = is_next and forward[act.mb] >= act.stage
    backward[act.mb] -= ready
    return ready


@st.composite
def playable_tables(draw: st.DrawFn) -> Table:
    dice = draw(st.randoms(use_true_random=False))
    ranks = draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 4))
    return random_table(
        dice, ranks=ranks, stages=draw(st.integers(ranks, 8)), microbatches=microbatches
    )


def corrupt(table: Table, dice: random.Random) -> Table:
    """Spoil one thing of a table: a few of these do no harm."""
    rows = [list(row) for row in table.rows]
    rank = dice.randrange(len(rows))
    row = rows[rank]
    other = rows[dice.randrange(len(rows))]
    i = dice.randrange(len(row))
    j = dice.randrange(len(row))
    match dice.choice(
        ("drop", "double", "swap", "move", "reverse", "rename", "renumber", "rehome", "exchange")
    ):
        case "drop":
            row.pop(i)
        case "double":
            row.insert(j, row[i])
        case "swap":
            row[i], row[j] = row[j], row[i]
        case "move":
            other.insert(dice.randint(0, len(other)), row.pop(i))
        case "reverse":
            row.reverse()
        case "rename":
            row[i] = row[i]._replace(kind=dice.choice("FBIW"))
        case "renumber":
            other_microbatch = dice.randint(0, table.microbatches)
            row[i] = row[i]._replace(mb=other_microbatch)
        case "rehome":
            stage = dice.randrange(table.num_stages)
            home = (
                *table.stage_to_rank[:stage],
                dice.randrange(len(rows)),
                *table.stage_to_rank[stage + 1 :],
            )
            return replace(table, stage_to_rank=home)
        case "exchange":
            rows[rank], rows[rows.index(other)] = other, row
    return replace(table, rows=tuple(map(tuple, rows)))


@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_every_schedule_makes_only_valid_tables(microbatches):
    checked = [table for table in tables() if table.microbatches in microbatches]
    assert len(checked) > 300
    for table in checked:
        validate(table)


@given(playable_tables())
def test_every_table_that_plays_is_valid_and_is_played_in_an_order_that_respects_who_waits(table):
    validate(table)
    order = linearize(table)
    assert sorted(order) == sorted(table.actions)
    place = {act: index for index, act in enumerate(order)}
    for row in table.rows:
        assert list(row) == sorted(row, key=place.__getitem__)
    for act in order:
        for need in table.needs(act):
            assert place[need] < place[act]


@settings(max_examples=250)
@given(
    st.deferred(lambda: st.sampled_from(small_tables())) | playable_tables(),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
def test_a_corrupted_table_is_rejected_with_an_action_named_or_still_plays(table, dice, times):
    for _ in range(times):
        table = corrupt(table, dice) if all(table.rows) else table
    if plays(table) and set(table.stage_to_rank) == set(range(table.num_ranks)):
        validate(table)
    else:
        with pytest.raises(ScheduleError, match=r"[FBIW]\d+\.\d+|own no stage"):
            validate(table)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("B0.0|F1.0 B1.0", "lacks F0.0"),
        ("F0.0 B0.0|F1.0", "lacks B1.0"),
        ("F0.0|F1.0", "lacks B0.0, B1.0"),
        ("F0.0 B0.0|F1.0 B1.0 B1.0", "more than once: B1.0"),
        ("F0.0 B0.0 F0.1|F1.0 B1.0", "must not hold F0.1"),
        ("F0.0 B0.0 F2.0|F1.0 B1.0", "must not hold F2.0"),
        ("F0.0 B0.0|F1.0 B1.0 I1.0 W1.0", "must not hold B1.0"),
        ("F0.0 B0.0|F1.0 I1.0", "lacks W1.0"),
        ("F0.0 B0.0|F1.0 W1.0", "lacks I1.0"),
        ("F0.0 B0.0 B1.0|F1.0", "rank 0 holds B1.0 .need only its stages 0"),
        ("B0.0 F0.0|F1.0 B1.0", "rank 0 is at B0.0 and waits for F0.0 .rank 0 is at B0.0"),
        ("F0.0 B0.0|F1.0 W1.0 I1.0", "rank 1 is at W1.0 and waits for I1.0"),
    ],
)
def test_a_fault_is_named(rows, says):
    table = Table(
        tuple(tuple(map(Act.parse, row.split())) for row in rows.split("|")),
        stage_to_rank=(0, 1),
        microbatches=1,
    )
    assert not plays(table)
    with pytest.raises(ScheduleError, match=says):
        validate(table)


def test_a_deadlock_that_a_check_of_each_rank_alone_misses_is_found_and_both_ranks_are_named():
    """Every action once, each forward before its backward: torch 2.13's `_validate_schedule` lets
    this table pass.
    """
    rows = ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    table = Table(
        tuple(tuple(map(Act.parse, row.split())) for row in rows),
        stage_to_rank=(0, 1),
        microbatches=2,
    )
    with pytest.raises(ScheduleError) as caught:
        validate(table)
    assert "rank 0 is at B0.0 and waits for B1.0 (rank 1 is at F1.1)" in str(caught.value)
    assert "rank 1 is at F1.1 and waits for F0.1 (rank 0 is at B0.0)" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (Table(((),), stage_to_rank=(0,), microbatches=0), "0 micro-batches"),
        (Table(((), ()), stage_to_rank=(0, 0), microbatches=1), "ranks 1 own no stage"),
        (Table(((),), stage_to_rank=(0, 3), microbatches=1), "stages 1 are on no rank"),
        (Table((), stage_to_rank=(), microbatches=1), "no ranks"),
    ],
)
def test_a_table_of_impossible_shape_is_rejected(table, says):
    with pytest.raises(ScheduleError, match=says):
        validate(table)


def test_a_backward_waits_for_whichever_of_whole_and_split_the_next_stage_runs():
    def waits(text, *, splits=()):
        found = needs(Act.parse(text), num_stages=2, splits=set(splits))
        return " ".join(map(str, found))

    assert waits("B0.3") == "F0.3 B1.3"
    assert waits("B0.3", splits=[(1, 3)]) == "F0.3 I1.3"
    assert waits("I0.3", splits=[(0, 3)]) == "F0.3 B1.3"
    assert waits("B1.3") == "F1.3"
    assert waits("W1.3") == "I1.3"
    assert waits("F0.3") == ""


def test_the_source_of_an_action_is_the_tensor_that_comes_from_the_neighbouring_stage():
    table = SCHEDULES["1f1b"].table(2, 1, 1)
    sources = {}
    for row in table.rows:
        for act in row:
            sources[str(act)] = str(table.source(act))
    assert sources == {"F0.0": "None", "F1.0": "F0.0", "B1.0": "None", "B0.0": "B1.0"}


@given(playable_tables())
def test_text_and_json_read_back_as_the_same_table(table):
    assert Table.parse(table.text) == table
    assert Table.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no header"),
        ("microbatches 1\nstage_to_rank 0\nrank 0: F0.0 X0.0", "cannot read the action 'X0.0'"),
        ("microbatches 1\nstage_to_rank 0\nrank 1: F0.0", r"line 3 .*rank 0: "),
        ("microbatches one", "line 1"),
        ("microbatches 1 2\nhome 0", "has no header"),
    ],
)
def test_a_text_that_is_no_table_is_rejected_with_its_line(text, says):
    with pytest.raises(ScheduleError, match=says):
        Table.parse(text)


def test_comments_and_blank_lines_are_no_part_of_a_table():
    text = "# mine\nmicrobatches 1  # one\n\nstage_to_rank 0\nrank 0: F0.0 B0.0 # done\n"
    assert Table.parse(text) == SCHEDULES["gpipe"].table(1, 1, 1)


def test_an_action_reads_back():
    assert Act.parse("W12.345") == Act("W", 12, 345)
    assert re.fullmatch(r"W12\.345", str(Act("W", 12, 345)))
