"""`weft report`: the page, picture and table of recorded runs, and what no text in a run may do to them."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.test_runs import write_run
from weft.cli import main
from weft.config.run_files import different_keys
from weft.errors import EXIT_OK, EXIT_USER
from weft.report.charts import charts
from weft.report.downsample import downsampled
from weft.report.figures import answers, final_figures, stage_memory
from weft.report.heat_map import expert_heat_map
from weft.report.page import report_page
from weft.report.recorded_values import RunRecord
from weft.report.svg_charts import WIDTH, chart_svg, picture
from weft.train.event_lines import to_line

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"


def add_events(folder: Path, *events: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(map(to_line, events))


def data_of(page: str) -> dict[str, Any]:
    """The JSON that the script of a page reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def test_the_curves_of_a_page_are_the_recorded_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0, 1.5], mesh="dp2")
    page = report_page([RunRecord.read(folder)])
    shown = {chart["title"]: chart["series"] for chart in data_of(page)["charts"]}
    assert shown["Loss"][0]["x"] == [1, 2, 3]
    assert shown["Loss"][0]["y"] == [3, 2, 1.5]
    assert shown["Speed"][0]["y"] == [50, 100, 150]
    assert data_of(page)["runs"][0]["x"]["tokens"] == [100, 200, 300]


@pytest.mark.parametrize(
    ("num_bytes", "unit", "shown"), [(2**29, "MiB", 512.0), (3 * 2**30, "GiB", 3.0)]
)
def test_memory_is_drawn_in_a_unit_of_its_size(
    num_bytes: int, unit: str, shown: float, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "one", [1.0], status="")
    step = {"event": "step", "step": 2, "loss": 1.0, "grad_norm": 1.0, "tokens": 1, "step_s": 1.0}
    add_events(folder, {**step, "mem_bytes": num_bytes, "stage_mem_bytes": [num_bytes]})
    (memory,) = [chart for chart in charts([RunRecord.read(folder)]) if chart.key == "memory"]
    assert memory.unit == unit
    assert memory.series[0].curve.y.tolist() == [shown]


def test_steps_behind_a_restart_count_once_and_are_reported(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0], status="")
    again = {
        "event": "step",
        "step": 2,
        "loss": 2.5,
        "grad_norm": 1.0,
        "tokens": 100,
        "step_s": 2.0,
    }
    restart = {"event": "restart", "step": 1, "reason": "rank 1 died", "attempt": 1}
    add_events(folder, restart, again)
    run = RunRecord.read(folder)
    assert run.steps.tolist() == [1, 2]
    assert run.columns["loss"].tolist() == [3.0, 2.5]
    assert run.repeated == 1
    assert final_figures(run)["restarts"] == "1"
    assert final_figures(run)["last loss"] == "2.5000 nats"


def test_evaluations_and_texts_that_a_resume_went_back_behind_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0], status="")
    for step, loss in ((1, 2.9), (2, 1.9)):
        text = {"event": "sample", "step": step, "prompt": "a", "text": f"of {loss}"}
        add_events(folder, {"event": "eval", "step": step, "loss": loss, "tokens": 9}, text)
    add_events(folder, {"event": "resume", "step": 1})
    run = RunRecord.read(folder)
    assert run.evaluations == ((1, 2.9),)
    assert [sample["text"] for sample in run.samples] == ["of 2.9"]


def test_texts_of_a_run_are_inert(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0], mesh=HOSTILE)
    note = {"event": "note", "step": 1, "text": HOSTILE}
    sample = {"event": "sample", "step": 2, "prompt": HOSTILE, "text": HOSTILE}
    proof = {"event": "proof", "verdict": "equal", "text": HOSTILE}
    add_events(folder, note, sample, proof)
    page = report_page([RunRecord.read(folder)])
    assert "<img" not in page
    assert "alert(1)</script>" not in page
    assert "\x1b" not in page
    assert page.count("<script") == 3  # the data, uPlot and the charts


def test_the_policy_of_a_page_names_its_scripts_and_nothing_else(tmp_path: Path) -> None:
    page = report_page([RunRecord.read(write_run(tmp_path / "one", [3.0, 2.0]))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    text = policy.group(1).replace("&#39;", "'")
    assert text.startswith("default-src 'none'")
    allowed = set(re.findall(r"'sha256-([^']*)'", text))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    assert {base64.b64encode(digest).decode() for digest in digests} == allowed
    assert len(allowed) == 2
    assert not re.search(r'(?:src|href)\s*=\s*"', page)


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=300), st.integers(2, 60))
def test_downsampling_keeps_extremes_and_order(values: list[float], most: int) -> None:
    y = np.array(values, dtype=np.float64)
    curve = downsampled(np.arange(len(y), dtype=np.float64), y, most=most)
    finite = y[np.isfinite(y)]
    assert curve.total == len(finite)
    assert len(curve.x) <= max(most, 2)
    assert (np.diff(curve.x) >= 0).all()
    assert (y[curve.x.astype(int)] == curve.y).all()
    if finite.size:
        assert curve.y.min() == finite.min()
        assert curve.y.max() == finite.max()


def test_a_page_of_100_000_steps_stays_below_a_megabyte(tmp_path: Path) -> None:
    losses = (3 + np.random.default_rng(0).standard_normal(100_000) / 10).tolist()
    losses[54_321] = 99.0
    run = RunRecord.read(write_run(tmp_path / "long", losses))
    page = report_page([run])
    assert len(page.encode()) < 1_000_000
    assert "of 100,000 points" in page
    (loss, *_) = charts([run])
    assert 99.0 in loss.series[0].curve.y


def test_findings_of_guards_stand_beside_an_equal_proof(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0])
    add_events(folder, {"event": "proof", "verdict": "equal", "text": "proved equal"})
    right, *_ = answers(RunRecord.read(folder))
    assert (right.text, right.kind) == ("equal to one device", "good")
    add_events(folder, {"event": "guard", "kind": "spike", "step": 2, "text": "the loss is 9"})
    right, *_ = answers(RunRecord.read(folder))
    assert right.text == "equal to one device; 1 finding of guards"
    assert right.kind == "bad"


def test_the_command_writes_page_picture_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = write_run(tmp_path / "one", [3.0, 0.1 + 0.2], mesh="dp2", optim__lr=0.1)
    two = write_run(tmp_path / "two", [3.0, float("nan")], mesh="dp2", optim__lr=0.2)
    assert main(["report", str(one)]) == EXIT_OK
    assert (one / "report.html").is_file()
    words = ["report", str(one), str(two / "run.toml"), "--svg", "both.svg", "--csv", "both.csv"]
    assert main(words) == EXIT_OK
    assert "both.csv: " in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().count("optim.lr") >= 2
    assert (tmp_path / "both.svg").read_text().startswith("<svg")
    with (tmp_path / "both.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["one", "one", "two", "two"]
    assert float(rows[1]["loss"]) == 0.1 + 0.2
    assert rows[3]["loss"] == ""
    runs = [RunRecord.read(folder) for folder in (one, two)]
    assert different_keys([dict(run.config) for run in runs]) == ["optim.lr"]


def test_a_png_is_the_picture_with_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("resvg_py")
    monkeypatch.chdir(tmp_path)
    one = write_run(tmp_path / "one", [3.0, 1.0, 2.0], mesh="dp2")
    assert main(["report", str(one), "--png", "one.png", "--svg", "one.svg"]) == EXIT_OK
    assert "one.png: " in capsys.readouterr().out
    drawn = image.open(tmp_path / "one.png").convert("RGB")
    height = re.search(r'height="(\d+)"', (tmp_path / "one.svg").read_text())
    assert height is not None
    assert drawn.size == (2 * WIDTH, 2 * int(height[1]))
    colours = {colour for _, colour in drawn.getcolors(1 << 20)}
    assert {(255, 255, 255), (0x25, 0x63, 0xEB)} <= colours, "ground and the first curve"
    title = drawn.crop((0, 0, 200, 60)).getcolors(1 << 20)
    assert len(title) > 10, "edges of letters have many shades"


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (None, "png: resvg_py is not installed. Fix: pip install 'weft-train[png]', or use --svg"),
        (object(), "png: there is no font on this machine for the text in a picture"),
    ],
)
def test_a_png_without_its_package_or_a_font_is_one_line(
    found: object,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("weft.report.png_picture.importlib.util.find_spec", lambda name: found)
    monkeypatch.setattr("weft.report.png_picture._rasterized", lambda svg: b"blank")
    one = write_run(tmp_path / "one", [3.0], mesh="dp2")
    png = tmp_path / "one.png"
    assert main(["report", str(one), "--png", str(png)]) == EXIT_USER
    assert capsys.readouterr().err.startswith(f"error: {line}")
    assert not png.exists()
    assert not (one / "report.html").exists()


def test_a_run_that_was_killed_says_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0], status="")
    assert main(["report", str(folder)]) == EXIT_OK
    assert "the end of the run is not recorded" in (folder / "report.html").read_text()


def test_a_legend_has_as_many_names_as_there_is_room_for(tmp_path: Path) -> None:
    names = [f"lr=1e-{number},global_size=8" for number in range(8)]
    runs = []
    for name in names:
        folder = write_run(tmp_path / name, [3.0, 2.0], mesh="dp2")
        add_events(folder, {"event": "eval", "step": 2, "loss": 2.5, "tokens": 9, "seconds": 1.0})
        runs.append(RunRecord.read(folder))
    (loss, *_) = charts(runs)
    svg = chart_svg(loss)
    entries = [float(x) for x in re.findall(r'<text x="([\d.-]+)" y="16" text-anchor="end"', svg)]
    assert "Loss, nats; points are evaluations" in svg
    assert re.search(r">and \d more<", svg)
    assert "evaluation<" not in svg
    assert min(entries) > 64 + 7 * len("Loss, nats; points are evaluations")
    assert chart_svg(charts(runs[:1])[0]).count(">evaluation<") == 1
    drawn = picture(charts(runs), names=names)
    assert all(drawn.count(f">{name}<") == 1 for name in names), "once, above all charts"
    assert not re.search(r">and \d more<", drawn)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "takes run folders (got nothing"),
        (("nowhere",), "nowhere"),
        (("one", "--csv", "x.txt"), "csv: "),
        (("one", "--out", "missing/x.html"), "out: its folder does not exist"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", [3.0])
    assert main(["report", *words]) == EXIT_USER
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def start_of(**fields: Any) -> dict[str, Any]:
    return {"event": "run", "steps": 4, "ranks": 2, **fields}


def proof_of(verdict: str, **fields: Any) -> dict[str, Any]:
    return {"event": "proof", "verdict": verdict, "text": f"proof is {verdict}", **fields}


@pytest.mark.parametrize(
    ("events", "text", "kind"),
    [
        ((proof_of("equal"),), "equal to one device", "good"),
        ((proof_of("equal"), proof_of("unknown", step=1)), "not all is proved", "plain"),
        ((proof_of("equal"), proof_of("different", step=1)), "differs from one device", "bad"),
        # the layout of a resume was not proved, that of the start was
        ((proof_of("equal"), start_of(start_step=2)), "not proved", "plain"),
        ((start_of(ranks=1),), "one rank", "plain"),
    ],
)
def test_the_answer_is_about_the_last_start(
    events: tuple[dict[str, Any], ...], text: str, kind: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0], status="")
    add_events(folder, *events)
    right, *_ = answers(RunRecord.read(folder))
    assert (right.text, right.kind) == (text, kind)


def test_the_speed_is_that_of_the_last_start(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [3.0, 2.0], status="")  # 50 and 100 tokens a second
    again = [
        {"event": "step", "step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1}
        | {"tokens_per_s": speed, "step_s": 1.0}
        for step, speed in ((3, 1.0), (4, 700.0), (5, 900.0))
    ]
    add_events(folder, start_of(start_step=2), *again)
    run = RunRecord.read(folder)
    assert run.typical_speed == 800.0
    prediction = {"event": "prediction", "step_s": 5.0, "low_s": 4.0, "high_s": 6.0}
    add_events(folder, {**prediction, "measured_s": 4.5})
    _, _, speed = answers(RunRecord.read(folder))
    assert any(line.endswith("first steps 4.5 s, inside that range") for line in speed.lines)


def test_memory_of_every_stage_stands_beside_its_prediction(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [1.0], status="")
    step = {"event": "step", "step": 2, "loss": 1.0, "grad_norm": 1.0, "tokens": 1, "step_s": 1.0}
    mib = 2**20
    for step_bytes in ([90 * mib, 50 * mib], [80 * mib, 60 * mib]):
        add_events(folder, {**step, "mem_bytes": 90 * mib, "stage_mem_bytes": step_bytes})
    assert stage_memory(RunRecord.read(folder)) == ()
    add_events(folder, {"event": "prediction", "stage_peak_bytes": [70 * mib, 40 * mib]})
    run = RunRecord.read(folder)
    assert stage_memory(run) == (("pp0", "70 MiB", "90 MiB"), ("pp1", "40 MiB", "60 MiB"))
    assert "Memory of the stages" in report_page([run])


def test_the_formula_and_the_peak_of_mfu_are_on_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [1.0, 1.0])
    start = {
        "event": "run",
        "ranks": 4,
        "model_flops": 2.0e12,
        "peak_tflops": 50.0,
        "start_step": 0,
    }
    step = {"event": "step", "step": 1, "loss": 1.0, "grad_norm": 1.0, "tokens": 1, "mfu": 0.5}
    add_events(folder, {**start, "mfu_text": "3 forwards of model FLOPs, of 50 TFLOP/s a device"})
    add_events(folder, *({**step, "step": number, "step_s": 1.0} for number in (1, 2)))
    run = RunRecord.read(folder)
    (mfu,) = [chart for chart in charts([run]) if chart.key == "mfu"]
    for text in (mfu.note, answers(run)[2].lines[1]):
        assert "3 forwards of model FLOPs, of 50 TFLOP/s a device" in text
        assert "2e+12, over its time and the peak of 4 devices" in text


def test_expert_loads_are_a_heat_map_of_blocks_and_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [1.0] * 200)
    assert expert_heat_map(RunRecord.read(folder)) == ""
    loads = [{"layer0": 1.0, HOSTILE: 1.0 + step / 200} for step in range(200)]
    events = [{"event": "blocks", "step": at, "expert_load": load} for at, load in enumerate(loads)]
    add_events(folder, *events)
    run = RunRecord.read(folder)
    drawn = ElementTree.fromstring(expert_heat_map(run))
    boxes = [each for each in drawn.iter() if each.tag.endswith("rect")]
    assert len({each.get("y") for each in boxes}) == 2
    assert len(boxes) == 2 * 67  # of three steps each, the largest
    opacity = [float(each.get("fill-opacity", "")) for each in boxes]
    assert set(opacity[:67]) == {0.06}
    assert opacity[67:] == sorted(opacity[67:])
    assert opacity[-1] == 1
    assert "layer0, step 2: 1" in expert_heat_map(run)
    page = report_page([run])
    assert "Expert load by block and step" in page
    assert "<img" not in page
