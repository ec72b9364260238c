"""The checks of `make gpu`, rehearsed on the CPU: they run, and the exit code says what they found."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.__main__ import TITLES
from benchmarks.gpu.sections import SECTIONS
from benchmarks.gpu.supervise import run_section

from tests.programs import programs

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


def run_plan(*options: str) -> subprocess.CompletedProcess[str]:
    return programs().run("", *options, module="benchmarks.gpu", folder=ROOT, timeout=PATIENCE_S)


@pytest.mark.timeout(PATIENCE_S)
def test_the_rehearsal_passes_and_prints_a_report():
    done = run_plan("--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    last_line = done.stdout.strip().splitlines()[-1]
    assert last_line.startswith("rehearsal on the CPU: 45 rows, 0 failed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the plan takes minutes")
def test_without_a_gpu_nothing_is_claimed():
    done = run_plan()
    assert done.returncode == 2
    assert "no GPU: nothing was checked" in done.stdout


WORKER = """
import json, os, sys, time
first, path = int(sys.argv[1]), sys.argv[2]
file = open(path, "a", buffering=1)
def write(**fields):
    file.write(json.dumps(fields) + "\\n")
for number, name in enumerate(["good", "dies", "hangs", "last"]):
    if number < first:
        continue
    write(kind="begin", name=name, number=number, limit_s=0.5 if name == "hangs" else 60.0)
    if name == "dies":
        os.abort()
    if name == "hangs":
        time.sleep(60)
    write(kind="row", name=name, value="1", is_ok=True)
write(kind="done")
"""


def command_of(program: str):
    return lambda first, lines: [sys.executable, "-S", "-c", program, str(first), str(lines)]


def test_a_check_that_dies_or_hangs_costs_its_own_row(tmp_path):
    rows = run_section(command_of(WORKER), tmp_path, until_s=time.monotonic() + 60)
    found = [(row.name, row.is_ok) for row in rows]
    assert found == [("good", True), ("dies", False), ("hangs", False), ("last", True)]


def test_a_section_whose_process_cannot_start_is_one_failed_row(tmp_path):
    rows = list(run_section(command_of("oops"), tmp_path, until_s=time.monotonic() + 60))
    assert [(row.name, row.is_ok) for row in rows] == [("start", False)]
    assert "NameError" in rows[0].value


def test_every_section_is_run():
    assert tuple(SECTIONS) == TITLES
