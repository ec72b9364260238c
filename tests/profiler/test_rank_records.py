"""Files of a profile: they read back as they were written, and damaged ones are one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.profiler.simulated_records import simulated_records
from weft.errors import UserError
from weft.profiler.profile_folder import new_profile_folder, profile_numbers, read_profile
from weft.profiler.rank_records import BlockStart, RankRecords, file_name, read_records
from weft.schedule.catalog import make_table


def records() -> tuple[RankRecords, ...]:
    found = simulated_records(make_table("1f1b", ranks=2, microbatches=3), hop=0.25)
    return tuple(replace(each, blocks=(BlockStart("layer0", 0.125),)) for each in found)


def write(folder: Path, ranks: tuple[RankRecords, ...]) -> None:
    for each in ranks:
        (folder / file_name(each.header.rank)).write_text(each.to_text())


def test_a_file_reads_back_as_it_was_written(tmp_path: Path) -> None:
    for each in records():
        path = tmp_path / file_name(each.header.rank)
        path.write_text(each.to_text())
        found = read_records(path)
        assert found.header == each.header
        for kind in ("phases", "actions", "blocks", "calls"):
            pairs = zip(getattr(found, kind), getattr(each, kind), strict=True)
            for read, written in pairs:
                for value, expected in zip(read, written, strict=True):
                    is_time = isinstance(expected, float)
                    assert value == (pytest.approx(expected, abs=1e-9) if is_time else expected)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('["action"', '["other"', 1),
        lambda text: text.replace('["phase",7', '["phase","x"', 1),
        lambda text: "[1]\n" + text,
        lambda text: text.replace('"rank": 0', '"rnk": 0'),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, spoil: object) -> None:
    assert callable(spoil)
    path = tmp_path / file_name(0)
    path.write_text(spoil(records()[0].to_text()))
    with pytest.raises(UserError) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)


def test_each_start_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folders = [new_profile_folder(tmp_path) for _ in range(3)]
    assert [each.name for each in folders] == ["1", "2", "3"]
    (tmp_path / "profile" / "notes").mkdir()
    assert profile_numbers(tmp_path) == [1, 2, 3]


def test_the_newest_whole_profile_is_read_and_missing_ranks_are_named(tmp_path: Path) -> None:
    write(new_profile_folder(tmp_path), records())
    write(new_profile_folder(tmp_path), records()[:1])  # its run was killed, or is elsewhere
    assert read_profile(tmp_path).folder.name == "1"
    with pytest.raises(UserError, match=r"no rank-00001\.jsonl"):
        read_profile(tmp_path, 2)
    with pytest.raises(UserError, match="no such profile"):
        read_profile(tmp_path, 3)
    with pytest.raises(UserError, match="no steps of the run were recorded"):
        read_profile(tmp_path / "profile")


def test_a_profile_that_is_still_to_come_is_told_apart_from_none(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('profile = "200:260"\n')
    with pytest.raises(UserError, match="it has not begun with steps 200:260"):
        read_profile(tmp_path)
    new_profile_folder(tmp_path)
    with pytest.raises(UserError, match="profile/1: has no records yet"):
        read_profile(tmp_path)


def test_ranks_of_other_hosts_are_put_on_the_clock_of_rank_0(tmp_path: Path) -> None:
    first, second = records()
    first = replace(first, header=replace(first.header, origin_s=100.0))
    second = replace(second, header=replace(second.header, origin_s=100.5))
    write(new_profile_folder(tmp_path), (first, second))
    found = read_profile(tmp_path).ranks[1]
    assert found.phases[0].start == pytest.approx(0.5)
    assert found.calls[0].start == pytest.approx(second.calls[0].start + 0.5)
