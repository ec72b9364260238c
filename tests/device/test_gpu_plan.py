"""The checks of `make gpu`, rehearsed on the CPU: they run, and the exit code says what they found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

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
    assert last_line.startswith("rehearsal on the CPU: 30 rows, 0 failed")


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the plan takes minutes")
def test_without_a_gpu_nothing_is_claimed():
    done = run_plan()
    assert done.returncode == 2
    assert "no GPU: nothing was checked" in done.stdout
