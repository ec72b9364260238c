"""Whole training steps on the fake CUDA device: one device for all tensors, few waits, copies and launches."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.device.layouts import LAYOUTS, OFFLOAD, PACKED, PACKED_LENGTH, Layout

TABLE = Path(__file__).with_name("counts.json")
"""What each layout may cost. It may only decrease: `WEFT_UPDATE_COUNTS=1 pytest tests/device` writes
it.
"""
PATIENCE_S = 400.0
SCENARIOS = ("fork", "threads")
"""Of tests/device/scenarios.py; the first must run before anything else in its process."""

CASES = [
    pytest.param(layout, marks=pytest.mark.slow if layout.is_slow else ()) for layout in LAYOUTS
]

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own"),
    pytest.mark.timeout(PATIENCE_S),
]


def build_library(folder: Path) -> Path:
    """Compile the fake device, unless the same source was compiled for this torch before."""
    torch_folder = Path(torch.__file__).parent
    source = Path(__file__).with_name("fake_cuda.cpp")
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", "-w", str(source)]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
    command += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    compiled_from = f"{command} {torch.__version__} {torch.version.git_version}".encode()
    key = hashlib.sha256(compiled_from + source.read_bytes()).hexdigest()[:16]
    library = folder / f"fake_cuda_{key}.so"
    if not library.exists():
        unfinished = folder / f"{key}_{os.getpid()}.so"
        subprocess.run([*command, "-o", str(unfinished)], check=True)
        unfinished.replace(library)
    return library


@pytest.fixture(scope="session")
def environ(request, tmp_path_factory):
    """The environment of a process with the fake device; pytest's cache keeps its library."""
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("fake_cuda") if cache else tmp_path_factory.mktemp("device")
    library = build_library(folder)
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root / "src"), str(root)))
    return {**os.environ, "WEFT_FAKE_CUDA": str(library), "PYTHONPATH": path}


def start(module: str, *args: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"tests.device.{module}", *args]
    return subprocess.Popen(
        command,
        env=environ,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="session")
def measured(request, environ):
    """Counts of the layouts whose tests were selected, by layout; an error counts as a result."""
    chosen = selected_params(request.session.items)
    numbers = [str(number) for number, layout in enumerate(LAYOUTS) if layout in chosen]
    scenarios = [name for name in SCENARIOS if name in chosen]
    process = start("measure", *scenarios, *numbers, environ=environ)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    found = {}
    for line in output.splitlines():
        counts = json.loads(line)
        found[counts["layout"]] = counts
    if os.environ.get("WEFT_UPDATE_COUNTS"):
        rows = {name: summary(counts) for name, counts in found.items() if "launches" in counts}
        TABLE.write_text(json.dumps({**allowed(), **rows}, indent=1) + "\n")
    return found


def selected_params(items: Sequence[pytest.Item]) -> set[Layout | str]:
    """The layouts and scenarios of the selected tests."""
    found = set()
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec else {}
        for name in ("layout", "scenario"):
            if name in params:
                found.add(params[name])
    return found


def allowed() -> dict[str, dict[str, int]]:
    """What each layout may cost."""
    return json.loads(TABLE.read_text())


def summary(counts: dict[str, object]) -> dict[str, int]:
    """The numbers of the table."""
    row = {
        "syncs": sum(counts["syncs"].values()),
        "copies": sum(counts["copies"].values()),
        "launches": counts["launches"],
    }
    for key, value in counts.items():
        if key.endswith("_per_layer"):
            row[key] = value
    return row


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_a_step_runs_on_one_device(layout, measured):
    counts = measured[str(layout)]
    assert "error" not in counts, counts["error"]
    assert counts["mixed"] == {}
    assert counts["not_on_device"] == []
    assert counts["not_planned"] == [], "groups that are not connected at start"
    assert counts["calls_on_cpu"] == [], "calls that connect gloo"
    assert counts["races"] == {}, "accesses on several streams that nothing orders"


def test_packed_documents_need_no_tensor_of_all_queries_and_keys(measured):
    packed = [counts for name, counts in measured.items() if PACKED in name]
    assert packed
    for counts in packed:
        assert counts["most_bytes"] < PACKED_LENGTH**2, "a mask of 1 byte a pair"


def test_gathers_and_reductions_of_zero_3_run_beside_the_computation(measured):
    (counts,) = [counts for name, counts in measured.items() if "dp2 --parallel.zero 3" in name]
    assert counts["gathers_behind_reductions"] == 0, "on a communicator of their own"
    overlap = counts["overlap"]
    assert overlap["all_gather"] > 0.6
    assert overlap["reduce_scatter"] > 0.6


@pytest.mark.slow
def test_no_layout_has_a_race_between_streams(environ):
    numbers = map(str, range(len(LAYOUTS)))
    checking = {**environ, "WEFT_CHECK_STREAMS": "1"}
    process = start("measure", *numbers, environ=checking)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    for line in output.splitlines():
        counts = json.loads(line)
        assert counts.get("races") == {}, counts


@pytest.mark.slow
def test_a_wait_between_streams_that_is_left_out_is_found(environ):
    process = start("mutants", environ=environ)
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    races: dict[str, dict[str, int]] = {}
    for line in output.splitlines():
        races.update(json.loads(line))
    assert races.pop("none") == {}
    assert len(races) == 6
    assert all(races.values()), races


@pytest.mark.parametrize("layout", CASES, ids=str)
def test_waits_copies_and_launches_do_not_increase(layout, measured):
    counts = measured[str(layout)]
    row = summary(counts)
    limits = allowed()[str(layout)]
    assert set(row) == set(limits)
    for key, number in row.items():
        where = {**counts["syncs"], **counts["copies"]}
        assert number <= limits[key], f"{key} increased; waits, copies: {where}"
    if layout.model == "llama3":
        assert row["syncs"] == 1, "a dense step waits once"
        is_offloaded = OFFLOAD in layout.options
        assert (row["copies"] > 0) == is_offloaded, "a dense step copies nothing else"
        if layout.checks_late:
            assert counts["late_syncs"] == {}, "with a late report the host waits for nothing"


def test_every_layout_has_a_row_in_the_table():
    assert {str(layout) for layout in LAYOUTS} == set(allowed())


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios(scenario, measured):
    assert "error" not in measured[scenario], measured[scenario]["error"]
