"""`weft doctor`: checks of the machine, each problem with a fix, also where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.cli import main
from weft.commands import doctor
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER

WITHOUT_TORCH = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Blocker())
from weft.cli import main

sys.exit(main(["doctor"]))
"""


def test_doctor_checks_versions_memory_and_a_collective_between_ranks(capsys):
    assert main(["doctor"]) == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    for line in lines:
        assert line.startswith(("ok ", " " * doctor.INDENT))
    for line in lines:
        assert len(line) <= doctor.WIDTH
    names = {line[6:19].strip() for line in lines}
    assert {"versions", "cores", "memory", "ranks"} <= names


def test_doctor_takes_no_arguments(capsys):
    assert main(["doctor", "please"]) == EXIT_USER
    assert (
        capsys.readouterr().err
        == "error: weft doctor: takes no arguments (got please). Fix: weft doctor\n"
    )


def test_doctor_works_without_torch_and_says_how_to_install_it():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_FAILED
    assert done.stderr == ""
    others = done.stdout.splitlines()
    last = next(line for line in others if line.startswith("FAIL  torch "))
    found = others[: others.index(last)]
    for line in found:
        assert line.startswith(("ok ", " " * doctor.INDENT))
    assert "cannot be imported: No module named 'torch'" in " ".join(done.stdout.split())
    assert "Fix: pip install torch" in " ".join(done.stdout.split())


@pytest.mark.parametrize("words", [["train", "--out", "run"], ["prove"]], ids=["train", "prove"])
def test_a_command_without_torch_says_how_to_install_it(words, tmp_path):
    program = WITHOUT_TORCH.replace('["doctor"]', repr(words))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == EXIT_USER
    assert last == "error: torch: is not installed. Fix: pip install torch (see weft doctor)"
    assert "Traceback" not in done.stderr


def test_a_missing_required_package_is_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setattr(doctor, "REQUIRED", (*doctor.REQUIRED, "no-such-package"))
    assert [str(finding) for finding in doctor._missing_packages()] == [
        "FAIL  no-such-package is not installed. Fix: pip install no-such-package"
    ]


def test_little_memory_is_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setattr(doctor, "MIN_MEMORY_GIB", 1e6)
    (finding,) = [finding for finding in doctor.examine() if finding.name == "memory"]
    assert finding.fix == "free memory: a small run takes 1e+06 GiB"


@pytest.mark.parametrize(
    ("text", "fix", "line"),
    [("2", "", "ok    cores         2"), ("1", "add", "FAIL  cores         1. Fix: add")],
)
def test_a_finding_is_one_line(text, fix, line):
    assert str(doctor.Finding("cores", text, fix)) == line
