"""Every notebook of examples/ runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.programs import programs

FOLDER = Path(__file__).parents[2] / "examples"
SHOWS = {
    "first_model": r"finished: loss 5\.\d+ -> [45]\.\d+\n(.*\n)+equal\n.* tp2 and dp2: \d\.\de-",
    "own_model": r"equal: \d+ tensors .*\nfinished: loss [34]\.\d+ -> [01]\.\d+\non one device: [01]\.\d+",
    "layouts": r"rank 0: F0\.0 F0\.1 .*\n(.*\n)+1f1b +27\.3% .*\n",
}
"""Pattern of what each prints."""
SLOW = {"first_model", "own_model"}
"""They start rank processes."""


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SHOWS]
)
def test_a_notebook_runs_from_its_first_cell_to_its_last(name: str, tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    code = ["".join(cell["source"]) for cell in cells(name) if cell["cell_type"] == "code"]
    script.write_text("\n\n".join(code), encoding="utf-8")
    done = programs().run(script=script, folder=tmp_path, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(SHOWS[name], done.stdout), done.stdout


def test_every_notebook_is_run_and_has_no_outputs() -> None:
    names = {file.stem for file in FOLDER.glob("*.ipynb")}
    assert names == {*SHOWS}
    for name in names:
        assert [cell["outputs"] for cell in cells(name) if cell.get("outputs")] == [], name
