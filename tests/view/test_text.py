"""Text views of schedules: the drawn table is the executed one, and pictures equal the reviewed ones."""

import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.random_table import random_table
from weft.schedule.actions import Act
from weft.schedule.catalog import SCHEDULES, make_table
from weft.schedule.simulate import simulate, unit_cost
from weft.schedule.timeline import Span, Timeline
from weft.view.colour import STYLES, paint
from weft.view.quantity import percent
from weft.view.text import draw

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"
LABEL = re.compile(r"([BIW]?)(\d+)([a-z]*)")


def read_back(picture, table):
    """The actions that a picture shows, row by row."""
    lines = [line.partition("│")[2] for line in picture.splitlines() if line.startswith("rank")]
    rows = []
    for rank, line in enumerate(lines):
        own = table.stages(rank)
        labels = [match.groups() for match in LABEL.finditer(line)]
        rows.append(
            tuple(
                Act(kind or "F", own["abcdefgh".index(c) if c else 0], int(mb))
                for kind, mb, c in labels
            )
        )
    return tuple(rows)


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_drawn_table_is_the_executed_one(schedule):
    for size in schedule.sizes(ranks=4, chunks=3, microbatches=12):
        table = schedule.table(*size)
        timeline = simulate(table)
        picture = draw(timeline, width=10_000)
        assert read_back(picture, table) == table.rows


@settings(max_examples=120)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(0, 4), st.integers(1, 12))
def test_any_table_is_drawn_as_it_runs(dice, ranks, more_stages, microbatches):
    table = random_table(dice, ranks=ranks, stages=ranks + more_stages, microbatches=microbatches)
    timeline = simulate(table, lambda act: unit_cost(act) * dice.choice((1, 1.5, 3)), hop=0.5)
    assert read_back(draw(timeline, width=10_000), table) == table.rows


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.txt")), ids=lambda file: file.stem)
def test_a_picture_is_as_reviewed(file):
    name, ranks, chunks, microbatches = re.fullmatch(
        r"(.+)-p(\d+)-v(\d+)-m(\d+)", file.stem
    ).groups()
    table = make_table(name, ranks=int(ranks), chunks=int(chunks), microbatches=int(microbatches))
    assert draw(simulate(table)) == file.read_text(encoding="utf-8")


def test_pictures_of_all_three_schedules_were_reviewed():
    assert {file.stem.split("-p")[0] for file in GOLDEN.glob("*.txt")} >= {
        "gpipe",
        "1f1b",
        "interleaved",
    }


def test_equal_numbers_of_activations_are_one_and_long_lists_are_clipped():
    equal = draw(simulate(make_table("gpipe", ranks=4, microbatches=4)))
    assert equal.endswith("activations held at once: 4 (all ranks)\n")
    many = draw(simulate(make_table("1f1b", ranks=16, microbatches=16)), width=10_000)
    assert many.endswith("activations held at once, by rank: 16 15 14 13 12 11 10 9 ...\n")


def test_a_narrow_picture_keeps_its_columns():
    table = make_table("interleaved", ranks=4, microbatches=16, chunks=2)
    lines = draw(simulate(table), width=60).splitlines()[:4]
    for line in lines:
        assert len(line) <= len("rank 0 │ ") + 60


def test_a_measured_timeline_with_gaps_and_other_spans_is_drawn_by_what_it_computed():
    spans = (
        Span(0, "F0.0", "F", 100.0, 101.0),
        Span(0, "all_reduce dp", "all_reduce", 100.0, 109.0),
        Span(0, "B0.0", "B", 103.0, 105.0),
    )
    assert draw(Timeline(spans, num_ranks=2, origin="measured")) == (
        "rank 0 │ 0 ··· B0─\n"
        "rank 1 │ ·········\n"
        "0 forward, B0 backward\n"
        "70.0% bubble, 5 s (measured); activations held at once, by rank: 1 0\n"
    )


def test_an_empty_timeline_can_be_drawn():
    assert draw(Timeline((), num_ranks=1, origin="measured")).startswith("rank 0 │")


def test_ranks_are_aligned_beyond_ten():
    starts = {
        line.index("│")
        for line in draw(simulate(make_table("1f1b", ranks=11, microbatches=1))).splitlines()[:11]
    }
    assert starts == {len("rank 10 ")}


def test_colour_changes_no_character():
    table = random_table(Random(3), ranks=3, stages=6, microbatches=3)
    timeline = simulate(table)
    painted = paint(timeline)
    lines = [line.rstrip() for line in painted.plain.splitlines()]
    assert lines == draw(timeline).splitlines()
    styles = {str(span.style) for span in painted.spans}
    assert styles == set(STYLES.values())


def test_a_footer_that_is_too_long_is_continued_behind_its_semicolon():
    lines = draw(simulate(make_table("1f1b", ranks=4, microbatches=8)), clip=60).splitlines()
    assert lines[-2:] == [
        "27.3% bubble, 33 units (predicted);",
        "  activations held at once, by rank: 4 3 2 1",
    ]


def test_a_small_share_is_not_zero_percent():
    shares = (0.0, 0.0024, 0.031, 0.4501, 1.0)
    assert [percent(share) for share in shares] == ["0%", "0.24%", "3.1%", "45%", "100%"]
