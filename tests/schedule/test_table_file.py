"""Schedule files: every table reads back equal, and what is no table of a bounded size is rejected soon."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from weft.errors import ScheduleError
from weft.schedule import table_file
from weft.schedule.actions import Table
from weft.schedule.catalog import SCHEDULES, find, lines_of, make_table
from weft.schedule.table_file import read_table, table_lines, table_of

HEAD = "microbatches 1\nstage_to_rank 0 1\n"


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_built_in_table_reads_back_equal(schedule) -> None:
    for p, v, m in schedule.sizes(ranks=4, chunks=3, microbatches=9):
        table = schedule.table(p, v, m)
        assert table_of(table_lines(table)) == table
        assert Table.from_json(table.to_json()) == table


def test_a_file_has_its_own_sizes(tmp_path: Path) -> None:
    path = tmp_path / "my.schedule"
    table = make_table("zbv", ranks=3, microbatches=5)
    path.write_text(f"# a V\n\n{table.text}", encoding="utf-8")
    assert make_table(str(path)) == read_table(path) == table
    assert lines_of(str(path)) == table_lines(table)
    assert lines_of("zbv") == ()


def test_the_content_of_a_file_replaces_the_file() -> None:
    table = make_table("1f1b", ranks=2, microbatches=3)
    found = find("/nowhere/my.schedule", table_lines(table))
    assert found.file_table == table
    assert found.name == "my.schedule"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0", "lacks actions"),
        (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 F1.0", "lacks B1.0"),
        (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 I1.0", "lacks W1.0"),
        (HEAD + "rank 0: F0.0 B0.0 B0.0\nrank 1: F1.0 B1.0", "more than once: B0.0"),
        (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 X1.0", "cannot read the action 'X1.0'"),
        (
            HEAD + "rank 0: B0.0 F0.0\nrank 1: F1.0 B1.0",
            r"rank 0 is at B0.0 and waits for F0.0 \(rank 0 is at B0.0\); rank 1 is at F1.0 and",
        ),
        (HEAD + "rank 0: F0.0 B0.0 F1.0 B1.0\nrank 1:", "rank 0 holds F1.0, B1.0"),
        ("microbatches 1\nstage_to_rank 0 2\nrank 0: F0.0 B0.0\nrank 1: F1.0 B1.0", "on no rank"),
        (HEAD + "microbatches 2\nrank 0: F0.0 B0.0\nrank 1: F1.0 B1.0", "repeats microbatches"),
        (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0 F9.0", "must not hold F9.0"),
        ("microbatches 0\nstage_to_rank 0\nrank 0: F0.0 B0.0", "has 0 micro-batches"),
        ("rank 0: F0.0 B0.0", "the table has no header"),
        (HEAD + "row 0: F0.0", "cannot read line 3"),
    ],
)
def test_what_is_wrong_is_named_with_a_fix(text: str, line: str) -> None:
    with pytest.raises(ScheduleError, match=line) as caught:
        table_of(text.splitlines())
    for fault in str(caught.value).splitlines():
        assert "Fix: " in fault


def test_ranks_own_equally_many_stages() -> None:
    text = "microbatches 1\nstage_to_rank 0 0 1\nrank 0: F0.0 F1.0 B1.0 B0.0\nrank 1: F2.0 B2.0"
    with pytest.raises(
        ScheduleError, match=r"different numbers of stages \(got 2, 1 stages.*Fix: "
    ):
        table_of(text.splitlines())


def test_a_header_that_asks_for_many_more_actions_than_there_are_is_rejected_at_once() -> None:
    """It took minutes: every action that lacks was listed."""
    words = " ".join(["0"] * 20_000)
    row = " ".join(f"F0.{mb}" for mb in range(20_000))
    text = f"microbatches 20000\nstage_to_rank {words}\nrank 0: {row}"
    start_s = time.process_time()
    with pytest.raises(ScheduleError, match="need at least 800000000: a forward and a backward"):
        table_of(text.splitlines())
    assert time.process_time() - start_s < 1.0


def test_a_table_is_as_large_as_a_config_may_store(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table("1f1b", ranks=2, microbatches=3)
    monkeypatch.setattr(table_file, "MAX_TEXT_BYTES", len(table.text))
    assert table_of(table_lines(table)) == table
    monkeypatch.setattr(table_file, "MAX_TEXT_BYTES", len(table.text) - 1)
    with pytest.raises(ScheduleError, match="the table is too large"):
        table_of(table_lines(table))
