"""Fixture `check` for the tests of the matrix, and the file of results that docs/support.md is written from."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import layouts
from tests.matrix.layouts import Case

RESULTS = os.environ.get("WEFT_MATRIX_RESULTS")
"""A file that every layout's result is added to, one JSON object a line; none: nothing is kept."""


@pytest.fixture
def check(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Callable[[Case], None]:
    """Assert that a layout computes what one device computes, and note how well."""
    is_slow = request.node.get_closest_marker("slow") is not None
    num_steps = layouts.NUM_STEPS if is_slow else layouts.QUICK_STEPS

    def checked(case: Case) -> None:
        start = time.perf_counter()
        record_property("case", asdict(case))
        phases = layouts.check(case, num_steps=num_steps)
        record_property("relative", max(phase.largest for phase in phases))
        record_property("compared", sum(phase.compared for phase in phases))
        record_property("seconds", round(time.perf_counter() - start, 2))

    return checked


@cache
def _commit() -> str:
    """What is checked out; with a plus where files were changed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return described.stdout.strip() or "no commit"


def pytest_runtest_logreport(report: Any) -> None:
    """Write down what a layout's test found; where tests run on several workers, the first process
    hears of all.
    """
    if RESULTS and report.when == "call" and "PYTEST_XDIST_WORKER" not in os.environ:
        found = dict(report.user_properties)
        if "case" in found:
            line = json.dumps({"outcome": report.outcome, "commit": _commit(), **found})
            with Path(RESULTS).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
