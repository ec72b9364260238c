"""`weft schedule` at 80 columns, as SVG and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft import cli
from weft.errors import EXIT_OK, EXIT_USER
from weft.schedule.actions import Table
from weft.schedule.catalog import make_table
from weft.schedule.simulate import simulate
from weft.schedule.timeline import Timeline, bubble


def test_schedule_clips_rows_and_wraps_text_at_the_columns_of_the_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        cli.main(
            ["schedule", "interleaved", "--ranks", "8", "--microbatches", "64", "--chunks", "4"]
        )
        == EXIT_OK
    )
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("rank")]
    assert len(rows) == 8
    assert all(len(line) <= 80 for line in lines)
    assert all(row.endswith("…") for row in rows)


def test_schedule_writes_svg_and_json(tmp_path, capsys):
    picture, numbers = tmp_path / "zbv.svg", tmp_path / "zbv.json"
    assert cli.main(["schedule", "zbv", "--svg", str(picture), "--json", str(numbers)]) == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [f"wrote {picture}", f"wrote {numbers}"]
    table = make_table("zbv", ranks=4, microbatches=8)
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    tooltips = root.findall(".//{http://www.w3.org/2000/svg}title")
    assert len(tooltips) == len(list(table.actions))
    fields = json.loads(numbers.read_text(encoding="utf-8"))
    assert Table.from_json(json.dumps(fields["table"])) == table
    timeline = Timeline.from_json(json.dumps(fields["timeline"]))
    assert timeline.unit == "units"
    assert fields["bubble"] == pytest.approx(float(bubble(simulate(table))))


def test_schedule_names_the_option_whose_file_cannot_be_written(tmp_path, capsys):
    assert cli.main(["schedule", "--svg", str(tmp_path / "missing" / "x.svg")]) == EXIT_USER
    error = capsys.readouterr().err
    assert "error: svg: cannot write the file" in error
    assert f"Fix: create the folder: mkdir -p {tmp_path / 'missing'}" in error


def test_schedule_reads_the_table_of_its_json_file(tmp_path, capsys):
    file = tmp_path / "zbv.json"
    assert cli.main(["schedule", "zbv", "--json", str(file)]) == EXIT_OK
    assert make_table(str(file), ranks=4, microbatches=8) == make_table(
        "zbv", ranks=4, microbatches=8
    )
    file.write_text('{"bubble": 1}', encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["schedule", str(file)]) == EXIT_USER
    assert f"the JSON in {file} is not a table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["1f1b", "extra"],
            "schedule: takes one name, or --compare (got 1f1b extra). Fix: weft schedule 1f1b extra --compare",
        ),
        (
            ["zbv", "--json"],
            "json: has no value (got nothing after the flag; need a file name). Fix: --json x.json",
        ),
    ],
)
def test_schedule_reports_wrong_words_in_one_line(words, error, capsys):
    assert cli.main(["schedule", *words]) == EXIT_USER
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_pictures_of_the_documentation_are_what_the_command_writes(tmp_path, name):
    picture = tmp_path / "picture.svg"
    assert cli.main(["schedule", name, "--svg", str(picture)]) == EXIT_OK
    documented = Path(__file__).parents[2] / "docs" / "pictures" / f"{name}.svg"
    assert picture.read_text(encoding="utf-8") == documented.read_text(encoding="utf-8")
