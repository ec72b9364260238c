"""Every file of examples/ is one command that succeeds, prints its result, and compares it with one process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import programs

FOLDER = Path(__file__).parents[2] / "examples"
SHOWS = {
    "collectives.py": "  2     [20 21 22 23]   [2 12 22 32]",
    "data_parallel_mlp.py": "  all_reduce of layer 1 starts\n  gradient of layer 0's weight",
    "tensor_parallel_mlp.py": "by hand: each rank has W1[8 of 16, 6] and W2[6, 8 of 16]",
    "pipeline_mlp.py": "rank 3 │ ····· 0 B0─ 1 B1─",
    "ring_attention.py": "  1     4-7, 24-27",
    "mnist_data_parallel.py": "accuracy 0.9",
}
"""A line of each example's output."""
NO_COMMAND = {"example_tools.py"}


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return programs().run(script=script, environ=environ, timeout=110)


def marked(name: str) -> object:
    """The longest example runs with the slow tests."""
    marks = pytest.mark.slow if name == "mnist_data_parallel.py" else ()
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in SHOWS])
def test_example_shows_its_lesson_and_equals_one_process(name: str, tmp_path: Path) -> None:
    done = run(FOLDER / name, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert SHOWS[name] in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal: ")


def test_every_example_is_run() -> None:
    names = {file.name for file in FOLDER.glob("*.py")}
    assert names == {*SHOWS, *NO_COMMAND}


def test_example_that_is_wrong_says_what_differs_and_fails(tmp_path: Path) -> None:
    text = (FOLDER / "tensor_parallel_mlp.py").read_text(encoding="utf-8")
    right, wrong = "return reducing.wait(), weight_grad", "return grad @ weight, weight_grad"
    assert right in text
    shutil.copy(FOLDER / "example_tools.py", tmp_path)
    (tmp_path / "wrong.py").write_text(text.replace(right, wrong), encoding="utf-8")
    done = run(tmp_path / "wrong.py", tmp_path)
    assert done.returncode == 1
    assert re.match(
        r"error: rank \d \(tp\d\): DifferenceError: by hand: dx differs from one process by ",
        done.stderr,
    )
    assert "equal" not in done.stdout
