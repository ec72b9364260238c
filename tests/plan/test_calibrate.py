"""`weft plan --calibrate`: the runs it makes, its report, and bad input, which is rejected before torch is imported."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.config.load import load
from weft.core.mesh import Mesh
from weft.errors import ConfigError
from weft.models import FAMILIES
from weft_plan.calibration.fit import Calibration
from weft_plan.calibration.measured_steps import Residual
from weft_plan.commands.calibrate import FLAG, calibrate, runs_of
from weft_plan.commands.calibrate_options import CalibrateOptions

FIGURES = """
node = 8
memory_gb = {value = 4, published = "its label"}
bf16_tflops = {value = 0.1, published = "its label"}
hbm_tb_s = {value = 0.01, published = "its label"}
"""


def machine(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def problem(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        calibrate([FLAG, *words])
    return str(caught.value)


def test_24_runs_of_three_meshes_are_valid() -> None:
    runs = runs_of(CalibrateOptions())
    assert len(runs) == len(set(runs)) == 24
    for words in (runs[0], runs[9], runs[23]):
        load(list(words), FAMILIES)
    assert {words[1] for words in runs} == {"dp2", "tp2", "pp2"}


def test_seconds_belong_to_their_runs_where_meshes_alternate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.planner.measure.measured_run import MeasuredRun
    from weft_plan.commands import calibrate_run  # late: they import torch

    launched: list[str] = []

    def fake_launch(main: partial[None], num_ranks: int, *, device: str, mesh: Mesh) -> int:
        runs, _, _, path = main.args
        launched.append(str(mesh))
        path.write_text(json.dumps([float(run.config.seed) for run in runs]))
        return 0

    monkeypatch.setattr(calibrate_run, "launch", fake_launch)
    meshes = ("dp2", "tp2", "tp2", "dp2")
    runs = []
    for seed, mesh in enumerate(meshes):
        run = load(["--mesh", mesh, "--seed", str(seed)], FAMILIES)
        runs.append(MeasuredRun.of(run))
    timed = calibrate_run.timed_runs(runs, CalibrateOptions(), tmp_path)
    assert timed.seconds == (0.0, 1.0, 2.0, 3.0)
    assert launched == ["dp2", "tp2", "dp2"]


def test_a_file_with_figures_is_needed(tmp_path: Path) -> None:
    sequence = ("bench compute", "bench comm --mesh dp2", "plan --calibrate")
    for command in sequence:
        assert f"weft {command} --write mine.toml" in problem()
        assert f"weft {command} --write {tmp_path}/no.toml" in problem(
            "--write", f"{tmp_path}/no.toml"
        )
    assert "is no hardware file" in problem("--write", str(tmp_path / "mine.json"))
    missing = machine(tmp_path, "node = 8")
    assert "memory_gb is missing" in problem("--write", missing)
    no_link = machine(tmp_path, FIGURES)
    assert "has no link" in problem("--write", no_link)
    zero = machine(tmp_path, FIGURES + 'link_gb_s = {value = 0, published = "its label"}')
    assert "link_gb_s" in problem("--write", zero)


def test_the_report_says_what_is_not_determined() -> None:
    from weft_plan.commands.calibrate_run import report

    residuals = (Residual("--mesh dp2 --model.dim 64", 0.010, 0.011),)
    constants = replace(Efficiency(), gemm=0.5, low=0.9, high=1.2)
    found = Calibration(constants, {"gemm": 0.1, "link": float("inf")}, residuals, (), {})
    text = report(found)
    assert "gemm               0.5  +- 10%" in text
    assert "not determined by these runs" in text
    assert "+10%" in text
    assert "0.90 to 1.20" in text


def test_the_fit_starts_from_what_the_file_has_measured() -> None:
    from weft_plan.commands.calibrate_run import CPU_START, start_of

    in_file = replace(Efficiency(), gemm=0.31, latency_s=4e-4)
    start = start_of(in_file, is_cuda=False)
    assert (start.gemm, start.latency_s) == (0.31, 4e-4)
    assert start.score_bytes == CPU_START.score_bytes


def test_the_file_says_which_constants_are_not_determined(tmp_path: Path) -> None:
    from weft_plan.commands.calibrate_run import write_constants

    path = machine(tmp_path, FIGURES)
    constants = replace(Efficiency(), gemm=0.5)
    found = Calibration(constants, {"gemm": 0.1, "link": float("inf")}, (), (), {})
    write_constants(path, found, num_runs=24)
    written = find_hardware(path).efficiency
    assert written.gemm == 0.5
    assert "fitted to 24 runs here" in written.source
    assert "not determined by them: link" in written.source


def test_nothing_is_written_where_other_programs_use_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft_plan.commands import calibrate_run

    monkeypatch.setattr(calibrate_run.os, "sched_getaffinity", lambda _: {0, 1})
    calibrate_run.check_idle(0.9)
    path = machine(tmp_path, FIGURES)
    before = Path(path).read_text()
    with pytest.raises(ConfigError, match=r"nothing is written \(got 1\.2 of 2 cores"):
        calibrate_run.check_idle(1.2)
    monkeypatch.setattr(calibrate_run.os, "getloadavg", lambda: (1.5, 1.0, 1.0))
    with pytest.raises(ConfigError, match="other programs use this machine"):
        calibrate_run.run_calibration(path, (), CalibrateOptions())
    assert Path(path).read_text() == before


def test_seconds_of_the_runs_themselves_are_not_those_of_others() -> None:
    from weft_plan.commands.calibrate_run import CpuUse

    begin = CpuUse(all_s=100.0, own_s=10.0)
    assert CpuUse(all_s=130.0, own_s=38.0).by_others_since(begin) == 2.0
