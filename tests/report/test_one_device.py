"""The losses of a run beside those of one device: kept in its folder, drawn on its page, and said in its first answer."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.commands.test_runs import write_run
from tests.report.test_report import add_events, data_of
from weft.cli import main
from weft.errors import EXIT_USER
from weft.prove.losses import FILE, StepLosses, keep_losses
from weft.report.charts import one_device_charts
from weft.report.figures import answers
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord
from weft.report.svg_charts import chart_svg

LOSSES = [3.0, 2.0, 1.5]


def compared(*alone: float, bound: float = 1e-6) -> list[StepLosses]:
    """The first of LOSSES beside these."""
    pairs = zip(LOSSES, alone, strict=False)
    return [
        StepLosses(step, recorded, other, bound) for step, (recorded, other) in enumerate(pairs, 1)
    ]


def run_with(folder: Path, losses: list[StepLosses]) -> RunRecord:
    write_run(folder, LOSSES, mesh="dp2")
    keep_losses(folder, losses)
    return RunRecord.read(folder)


def test_the_page_has_both_losses_and_their_difference_on_a_log_axis(tmp_path: Path) -> None:
    run = run_with(tmp_path / "one", compared(3.0, 2.0 * (1 + 2e-8), 1.5 * (1 - 1e-7)))
    drawn = {chart["title"]: chart for chart in data_of(report_page([run]))["charts"]}
    layout, alone = drawn["Loss beside one device"]["series"]
    assert (layout["y"], alone["y"]) == (LOSSES, pytest.approx(LOSSES))
    difference, bound = drawn["Difference from one device"]["series"]
    assert drawn["Difference from one device"]["log"]
    assert difference["x"] == [2, 3], "a log axis has no 0"
    assert difference["y"] == pytest.approx([2e-8, 1e-7], rel=1e-6)
    assert bound["y"] == [1e-6] * 3
    assert "not drawn: 1 step." in report_page([run])
    svg = chart_svg(one_device_charts([run])[1])
    ticks = [svg.index(f">{value:g}</text>") for value in (1e-8, 1e-7, 1e-6)]
    assert ticks == sorted(ticks)
    assert "more</text>" not in svg


def test_several_runs_have_their_differences_over_each_other(tmp_path: Path) -> None:
    one = run_with(tmp_path / "one", compared(3.0 * (1 + 1e-7)))
    two = run_with(tmp_path / "two", [])
    beside, difference = one_device_charts([one, two])
    assert not beside.series
    assert [series.label for series in difference.series] == ["one"]


def test_the_first_answer_says_how_far_the_losses_are_apart(tmp_path: Path) -> None:
    equal = answers(run_with(tmp_path / "equal", compared(3.0, 2.0 * (1 + 4e-7))))[0]
    assert (equal.text, equal.kind) == ("losses equal to one device", "good")
    assert "equal to those of one device: 4.0e-07 apart in step 2" in equal.lines[0]
    wrong = answers(run_with(tmp_path / "wrong", compared(3.0, 2.0 * (1 + 4e-5))))[0]
    assert (wrong.text, wrong.kind) == ("differs from one device", "bad")
    assert "NOT equal" in wrong.lines[-1]
    none = answers(run_with(tmp_path / "none", []))[0]
    assert none.text == "not proved"


def test_steps_that_were_trained_again_are_no_longer_compared(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    run_with(folder, compared(*LOSSES))
    again = {"event": "step", "step": 3, "loss": 1.4, "grad_norm": 1.0, "tokens": 1, "step_s": 1.0}
    add_events(folder, {"event": "resume", "step": 2}, again)
    assert [each.step for each in RunRecord.read(folder).losses] == [1, 2]


def test_losses_of_an_earlier_start_prove_nothing_of_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    run_with(folder, compared(3.0, 2.0))
    add_events(folder, {"event": "run", "start_step": 2, "layout": "tp2"})
    right = answers(RunRecord.read(folder))[0]
    assert (right.text, right.kind) == ("not proved", "plain")
    assert "equal to those of one device" in right.lines[-1]


def test_further_steps_are_kept_beside_those_before(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    run_with(folder, compared(3.0, 2.0, 1.5))
    keep_losses(folder, compared(3.0, bound=1e-9))
    assert [each.bound for each in RunRecord.read(folder).losses] == [1e-9, 1e-6, 1e-6]


def test_losses_that_are_not_finite_are_kept_and_not_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [math.nan, math.nan])
    keep_losses(folder, [StepLosses(step, math.nan, math.nan, 1e-6) for step in (1, 2)])
    run = RunRecord.read(folder)
    assert len(run.losses) == 2
    assert answers(run)[0].kind == "good"
    assert report_page([run])


@pytest.mark.parametrize(
    "text",
    [
        "[]\n",
        '{"step": 1}\n',
        '{"step": "x", "recorded": 3, "alone": 3, "bound": 1}\n',
        '{"step": 1, "recorded": 3, "alone": 2, "bound": 0}\n',
        "\x00\n",
    ],
)
def test_a_damaged_file_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "one", LOSSES)
    (folder / FILE).write_text(text)
    assert main(["report", str(folder)]) == EXIT_USER
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder / FILE}: cannot be read: ")
    assert len(error.splitlines()) == 1
    keep_losses(folder, compared(3.0))
    assert len(RunRecord.read(folder).losses) == 1


def test_a_folder_that_cannot_be_written_stays_as_it_is(tmp_path: Path) -> None:
    keep_losses(tmp_path / "missing", compared(3.0))
    assert not (tmp_path / "missing").exists()
