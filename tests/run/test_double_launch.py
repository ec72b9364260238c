"""Two jobs started on one port at the same time, and a stray client: neither mixes with the other nor hangs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import programs

PROGRAM = Path(__file__).with_name("double_launch.py")


@pytest.mark.parametrize(
    "num_pairs", [2, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_jobs_on_one_port_neither_mix_nor_hang(num_pairs):
    ran = programs().run("", str(num_pairs), script=PROGRAM, timeout=1200)
    outcomes = json.loads(ran.stdout)
    assert outcomes["ok"] == num_pairs, (outcomes, ran.stderr)
