"""Whole training steps on the fake CUDA device: one device for all tensors, few waits, copies and launches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.device.layouts import LAYOUTS

TABLE = Path(__file__).with_name("counts.json")
"""What each layout may cost. It may only decrease: `WEFT_UPDATE_COUNTS=1 pytest tests/device` writes
it.
"""
NUM_PROCESSES = 2
PATIENCE_S = 400.0

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.timeout(PATIENCE_S),
]


def build_library(folder: Path) -> Path:
    """Compile the fake device."""
    library = folder / "fake_cuda.so"
    torch_folder = Path(torch.__file__).parent
    source = Path(__file__).with_name("fake_cuda.cpp")
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", "-w", str(source)]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib"]
    command += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


@pytest.fixture(scope="session")
def environ(tmp_path_factory):
    """The environment of a process with the fake device."""
    library = build_library(tmp_path_factory.mktemp("device"))
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
def measured(environ):
    """Counts by layout; an error counts as a result."""
    processes = []
    for first in range(NUM_PROCESSES):
        numbers = map(str, range(first, len(LAYOUTS), NUM_PROCESSES))
        processes.append(start("measure", *numbers, environ=environ))
    results = [process.communicate(timeout=PATIENCE_S) for process in processes]
    found = {}
    for process, (output, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
        for line in output.splitlines():
            counts = json.loads(line)
            found[counts["layout"]] = counts
    return found


def summary(counts: dict[str, object]) -> dict[str, int]:
    """The numbers of the table."""
    row = {
        "syncs": sum(counts["syncs"].values()),
        "copies": sum(counts["copies"].values()),
        "launches": counts["launches"],
    }
    row.update({key: value for key, value in counts.items() if key.endswith("_per_layer")})
    return row


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_runs_on_one_device(layout, measured):
    counts = measured[str(layout)]
    assert "error" not in counts, counts["error"]
    assert counts["mixed"] == {}
    assert counts["not_on_device"] == []
    assert counts["not_planned"] == [], "groups that are not connected at start"


def test_waits_copies_and_launches_do_not_increase(measured):
    rows = {name: summary(counts) for name, counts in measured.items() if "error" not in counts}
    if os.environ.get("WEFT_UPDATE_COUNTS"):
        TABLE.write_text(json.dumps(rows, indent=1) + "\n")
    allowed = json.loads(TABLE.read_text())
    assert set(rows) == {str(layout) for layout in LAYOUTS} == set(allowed)
    for name, row in rows.items():
        assert set(row) == set(allowed[name])
        for key, number in row.items():
            where = {**measured[name]["syncs"], **measured[name]["copies"]}
            assert number <= allowed[name][key], f"{name}: {key} increased; waits, copies: {where}"


def test_a_dense_step_waits_once_and_copies_nothing(measured):
    for layout in LAYOUTS:
        if layout.model == "llama3":
            row = summary(measured[str(layout)])
            assert (row["syncs"], row["copies"]) == (1, 0), layout


@pytest.mark.parametrize("scenario", ["fork", "threads"])
def test_scenarios(scenario, environ):
    process = start("scenarios", scenario, environ=environ)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
