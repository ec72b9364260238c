"""The catalogue of schedules: discovered, validated, drawn as their docstrings show."""

import re
from pathlib import Path

import pytest

from weft.errors import ScheduleError
from weft.schedule import catalog
from weft.schedule.actions import Table
from weft.schedule.catalog import SCHEDULES, find, make_table
from weft.schedule.simulate import simulate
from weft.schedule.validate_table import validate
from weft.view.text import draw

FOLDER = Path(catalog.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
PICTURE = re.compile(r"table\(ranks=(\d+), chunks=(\d+), microbatches=(\d+)\)\n((?: *rank .*\n)+)")


def drawn(name, size):
    lines = draw(simulate(SCHEDULES[name].table(*size))).splitlines()
    return [line for line in lines if line.startswith("rank")]


def pictures(text):
    return [
        (tuple(map(int, sizes)), [row.strip() for row in rows.splitlines()])
        for *sizes, rows in PICTURE.findall(text)
    ]


def test_every_file_with_a_name_is_a_schedule():
    declared = [
        re.findall(r'^NAME = "(.+)"$', file.read_text(encoding="utf-8"), re.MULTILINE)
        for file in FOLDER.glob("*.py")
    ]
    names = {name for found in declared for name in found}
    assert names == set(SCHEDULES) >= {"gpipe", "1f1b", "interleaved"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_picture_in_a_schedules_docstring_is_what_it_makes(name):
    found = pictures(SCHEDULES[name].doc)
    assert found, (
        "the docstring has no picture: 'table(ranks=4, chunks=1, microbatches=8)', then the rows of weft.view.text.draw"
    )
    for size, rows in found:
        assert rows == drawn(name, size)


def test_every_picture_of_the_page_is_what_the_schedule_makes():
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    by_name = {}
    for section in sections:
        heading = re.match(r"`(.+)`", section)
        if heading:
            by_name[heading[1]] = section
    assert {"gpipe", "1f1b", "interleaved"} <= set(by_name) <= set(SCHEDULES)
    for name, section in by_name.items():
        assert pictures(section)
        for size, rows in pictures(section):
            assert rows == drawn(name, size)


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(block, {})


def test_the_table_on_the_page_is_a_table():
    text = re.search(
        r"```\n(microbatches.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )[1]
    assert Table.parse(text) == make_table("1f1b", ranks=2, microbatches=3)


def test_one_rank_is_gradient_accumulation_and_1f1b_keeps_one_micro_batch_in_flight():
    assert str(make_table("1f1b", ranks=1, microbatches=3).text) == (
        "microbatches 3\nstage_to_rank 0\nrank 0: F0.0 B0.0 F0.1 B0.1 F0.2 B0.2\n"
    )


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_runs_on_one_rank_and_with_its_default_chunks(schedule):
    for microbatches in range(1, 9):
        validate(make_table(schedule.name, ranks=1, microbatches=microbatches))
    assert schedule.default_chunks in schedule.chunks


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fewer_micro_batches_than_ranks_are_taken(name):
    validate(make_table(name, ranks=8, microbatches=3))


@pytest.mark.parametrize(("microbatches", "works"), [(6, [4, 8]), (3, [4]), (9, [8, 12])])
def test_interleaved_says_which_numbers_of_micro_batches_work(microbatches, works):
    with pytest.raises(ScheduleError, match="a multiple of 4") as caught:
        make_table("interleaved", ranks=4, microbatches=microbatches, chunks=2)
    fault = str(caught.value)
    assert fault.startswith("pipeline.schedule: ")
    actual = list(map(int, re.search(r"Fix: run ([\d or]+) micro", fault)[1].split(" or ")))
    assert actual == works
    for number in works:
        validate(make_table("interleaved", ranks=4, microbatches=number, chunks=2))


def test_all_impossible_sizes_are_reported_together():
    with pytest.raises(ScheduleError) as caught:
        make_table("1f1b", ranks=0, microbatches=0, chunks=2)
    keys = [fault.key for fault in caught.value.faults]
    assert keys == ["mesh", "batch", "pipeline.chunks"]
    assert "need 1" in str(caught.value)


def test_interleaved_wants_at_least_two_chunks():
    with pytest.raises(
        ScheduleError, match=r"pipeline.chunks: .* 1 chunk .*need 2 to .*Fix: --pipeline.chunks 2"
    ):
        make_table("interleaved", ranks=4, microbatches=8, chunks=1)


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(ScheduleError, match="did you mean 'interleaved'"):
        find("interleave")


def test_a_file_that_holds_a_table_is_a_schedule_for_its_own_sizes(tmp_path):
    table = make_table("interleaved", ranks=2, microbatches=4, chunks=3)
    path = tmp_path / "mine.txt"
    path.write_text("# by hand\n" + table.text)
    assert make_table(str(path), ranks=2, microbatches=4) == table
    assert find(str(path)).default_chunks == 3
    with pytest.raises(
        ScheduleError, match="2 ranks and 8 micro-batches; need 2 ranks and 4 micro-batches"
    ):
        make_table(str(path), ranks=2, microbatches=8)


def test_a_file_whose_table_deadlocks_is_rejected_when_it_is_read(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("microbatches 1\nstage_to_rank 0\nrank 0: B0.0 F0.0\n")
    with pytest.raises(ScheduleError, match="deadlock"):
        find(str(path))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_the_sizes_of_a_schedule_are_those_it_takes(schedule):
    sizes = set(schedule.sizes(ranks=4, chunks=3, microbatches=6))
    assert sizes
    for p in range(1, 5):
        for v in range(1, 4):
            for m in range(1, 7):
                assert ((p, v, m) in sizes) == (
                    not schedule.faults(ranks=p, chunks=v, microbatches=m)
                )
