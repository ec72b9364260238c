"""`weft doctor`: checks of the machine, each problem with a fix, also where torch cannot be imported."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft import set_up
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
        assert line.startswith(("ok ", " " * set_up.INDENT))
    for line in lines:
        assert len(line) <= set_up.WIDTH
    names = {line[6:19].strip() for line in lines}
    assert {"python", "versions", "cores", "memory", "ranks", "verdict"} <= names
    assert "ready: runs train here on" in lines[-2] + lines[-1]


def test_doctor_takes_no_arguments(capsys):
    assert main(["doctor", "please"]) == EXIT_USER
    assert (
        capsys.readouterr().err
        == "error: weft doctor: takes no arguments (got please). Fix: weft doctor\n"
    )


def test_doctor_works_without_torch_and_says_how_to_install_it():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_FAILED
    assert done.stderr == ""
    others = done.stdout.splitlines()
    last = next(line for line in others if line.startswith("FAIL  torch "))
    found = others[: others.index(last)]
    for line in found:
        assert line.startswith(("ok ", " " * set_up.INDENT))
    assert "cannot be imported: No module named 'torch'" in " ".join(done.stdout.split())
    assert "Fix: pip install torch" in " ".join(done.stdout.split())


WITHOUT_PACKAGES = """
import runpy, sys
sys.version_info = (*map(int, sys.argv[1].split(".")), 0, "final", 0)
sys.path.insert(0, {source!r})
sys.argv = ["weft", *sys.argv[2:]]
runpy.run_module("weft", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("python", "words", "code", "text"),
    [
        ("3.12", "doctor", EXIT_FAILED, "numpy, pydantic, tyro"),
        ("3.9", "doctor", EXIT_FAILED, "make setup PYTHON=python3.11"),
        ("3.12", "train", EXIT_USER, ": cannot be imported. Fix: pip install numpy pydantic tyro"),
        ("3.10", "train", EXIT_USER, "error: weft: cannot be imported. Fix: Python 3.11 or newer"),
    ],
)
def test_without_any_package_each_command_says_what_is_missing(python, words, code, text):
    """`python -S` has the standard library alone."""
    program = WITHOUT_PACKAGES.format(source=str(Path(weft.__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-S", "-I", "-c", program, python, *words.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code
    assert text in " ".join((done.stdout + done.stderr).split())
    if words == "doctor":
        assert "FAIL  verdict       not ready" in done.stdout
    else:
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["train", "--out", "run"], ["prove"]], ids=["train", "prove"])
def test_a_command_without_torch_says_how_to_install_it(words, tmp_path):
    program = WITHOUT_TORCH.replace('["doctor"]', repr(words))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == EXIT_USER
    assert last == "error: torch: is not installed. Fix: pip install torch (see weft doctor)"
    assert "Traceback" not in done.stderr


def test_a_missing_required_package_is_a_problem_with_a_fix(monkeypatch):
    monkeypatch.setattr(set_up, "REQUIRED", (*set_up.REQUIRED, "no-such-package"))
    assert [str(finding) for finding in set_up.examine_set_up() if finding.fix] == [
        "FAIL  packages      no-such-package: not installed. Fix: pip install no-such-package"
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
    assert str(set_up.Finding("cores", text, fix)) == line


def _make(folder, *words):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(Path(__file__).parents[2] / name, folder)
    return subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, check=False)


def test_make_with_an_old_python_names_the_one_that_is_needed_and_leaves_nothing(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = _make(tmp_path, "train", f"PYTHON={old}")
    assert done.returncode == EXIT_USER
    assert "error: python: is missing or too old (need Python 3.11 or newer)" in done.stdout
    assert "make train PYTHON=python3.11" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_make_does_not_use_a_folder_of_an_old_python(tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = _make(tmp_path, "train")
    assert done.returncode == EXIT_USER
    assert "Fix: rm -r .venv, then make train" in done.stdout
