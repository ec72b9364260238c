"""`weft schedule` at 80 columns, as SVG and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft import cli
from weft.errors import EXIT_OK, EXIT_USER
from weft.schedule.actions import Table
from weft.schedule.catalog import make_table
from weft.schedule.simulate import simulate
from weft.schedule.timeline import Timeline, bubble
from weft.start.checked_run import load_checked_run


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
    for line in lines:
        assert len(line) <= 80
    for row in rows:
        assert row.endswith("…")


SVG = "{http://www.w3.org/2000/svg}"


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_schedule_writes_svg_and_json(tmp_path, capsys):
    picture = tmp_path / "zbv.svg"
    numbers = tmp_path / "zbv.json"
    words = ["schedule", "zbv", "--svg", str(picture), "--json", str(numbers)]
    assert cli.main(words) == EXIT_OK
    shown = capsys.readouterr().out
    assert shown.splitlines() == [f"wrote {picture}", f"wrote {numbers}"]
    table = make_table("zbv", ranks=4, microbatches=8)
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    tooltips = root.findall(f".//{SVG}title")
    assert len(tooltips) == len(list(table.actions))
    fields = read_json(numbers)
    text = json.dumps(fields["table"])
    assert Table.from_json(text) == table
    timeline = Timeline.from_json(json.dumps(fields["timeline"]))
    assert timeline.unit == "units"
    expected_bubble = float(bubble(simulate(table)))
    assert fields["bubble"] == pytest.approx(expected_bubble)


def test_schedule_names_the_option_whose_file_cannot_be_written(tmp_path, capsys):
    assert cli.main(["schedule", "--svg", str(tmp_path / "missing" / "x.svg")]) == EXIT_USER
    error = capsys.readouterr().err
    assert "error: svg: cannot write the file" in error
    assert f"Fix: mkdir -p {tmp_path / 'missing'}, or another --svg" in error


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


COMPARED = ["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dual_pipe_v"]


def test_a_comparison_is_one_line_a_schedule_in_80_columns(capsys):
    words = ["schedule", *COMPARED, "--compare", "--ranks", "4", "--microbatches", "8"]
    assert cli.main(words) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines[3:9]]
    assert names == COMPARED
    assert lines[4].split() == ["1f1b", "1", "27.3%", "33", "4", "4", "3", "2", "1", "48"]


DOCS = Path(__file__).parents[2] / "docs"


def test_the_comparison_of_the_page_is_what_the_command_prints(capsys):
    text = (DOCS / "schedules.md").read_text(encoding="utf-8")
    console = re.search(r"```console\n\$ weft (.*?)\n(.*?)```", text, re.DOTALL)
    command, shown = console.groups()
    assert cli.main(command.split()) == EXIT_OK
    assert capsys.readouterr().out == shown


def test_a_comparison_as_svg_has_one_time_scale_and_as_json_all_figures(tmp_path, capsys):
    picture = tmp_path / "x.svg"
    numbers = tmp_path / "x.json"
    words = ["schedule", "--compare", "gpipe", "zbv", "--svg", str(picture), "--json", str(numbers)]
    assert cli.main(words) == EXIT_OK
    capsys.readouterr()
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    widths = {}
    for group in root.findall(f"{SVG}g"):
        tooltip = group.find(f"{SVG}title").text
        name = tooltip.partition(":")[0]
        width = group.find(f"{SVG}rect").get("width")
        widths.setdefault(name, []).append(float(width))
    of_gpipe, of_zbv = widths["F0.0"]
    assert of_gpipe == pytest.approx(2 * of_zbv, abs=0.02), "a chunk is half a stage"
    gpipe, zbv = read_json(numbers)["schedules"]
    assert gpipe["name"] == "gpipe"
    assert gpipe["makespan"] == 33
    assert gpipe["messages"] == 48
    assert zbv["name"] == "zbv"
    assert zbv["makespan"] == 25.5
    assert zbv["messages"] == 96


@pytest.mark.slow
def test_a_comparison_with_a_config_has_the_bytes_of_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Path("run.toml")
    numbers = Path("x.json")
    config.write_text('mesh = "pp2"\n[batch]\nglobal_size = 8\nmicro_size = 1\n', encoding="utf-8")
    words = ["schedule", "gpipe", "1f1b", "--compare", "--config", str(config)]
    assert cli.main([*words, "--json", str(numbers)]) == EXIT_OK
    assert cli.main(words) == EXIT_OK
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 80
    gpipe, one = json.loads(numbers.read_text(encoding="utf-8"))["schedules"]
    run = load_checked_run([str(config)])
    boundary = 4 * run.data.seq_len * run.model.dim
    assert gpipe["message_bytes"] == one["message_bytes"] == 2 * 8 * boundary
    assert gpipe["activation_bytes"] > 3 * one["activation_bytes"]


def test_a_table_written_as_text_is_drawn_with_its_own_sizes(tmp_path, capsys):
    file = tmp_path / "mine.schedule"
    words = ["schedule", "zbv", "--ranks", "2", "--microbatches", "3", "--text", str(file)]
    assert cli.main(words) == EXIT_OK
    table = make_table("zbv", ranks=2, microbatches=3)
    assert file.read_text(encoding="utf-8") == table.text
    assert cli.main(["schedule", str(file)]) == EXIT_OK
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank")]
    assert len(rows) == 2


def test_a_search_writes_the_table_it_names(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["schedule", "--search", "--ranks", "2", "--microbatches", "3", "--memory-limit", "1"]
    assert cli.main([*words, "--chunks", "1", "--json", "x.json"]) == EXIT_OK
    shown = capsys.readouterr().out
    for line in shown.splitlines():
        assert len(line) <= 80
    assert "proven: no table of these placements is shorter" in shown
    fields = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert fields["is_optimal"]
    assert fields["best"]["makespan"] == fields["bound"] == 15, "3 round trips of rank 0"
    table = make_table("searched.schedule")
    text = json.dumps(fields["best"]["table"])
    assert Table.from_json(text) == table
    assert cli.main([*words, "--chunks", "1"]) == EXIT_OK, "its own file is replaced"
    (tmp_path / "searched.schedule").write_text("mine", encoding="utf-8")
    assert cli.main(words) == EXIT_USER
    assert (tmp_path / "searched.schedule").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["1f1b", "extra"],
            "schedule: takes one name, or --compare (got 1f1b extra). Fix: weft schedule 1f1b extra --compare",
        ),
        (
            ["zbv", "--svg"],
            "svg: has no value (got nothing after the flag; need a file name). Fix: --svg x.svg",
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
    documented = DOCS / "pictures" / f"{name}.svg"
    written = picture.read_text(encoding="utf-8")
    assert written == documented.read_text(encoding="utf-8")
