"""Three packages: `weft` works without the planner and the self-tests, and finds their commands by entry points."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from weft.cli import COMMANDS, all_commands, main
from weft.commands.command import ENTRY_POINTS, Command, installed_command
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER

WRAPPER = """
import sys, weft
weft.DistributedDataParallel
assert "pydantic" not in sys.modules
print(*(name for name in sys.modules if name.partition(".")[0] == "weft"))
"""


def test_a_wrapper_of_a_script_loads_few_modules_and_no_config() -> None:
    """Those of processes, their groups and shared memory are loaded where a process joins them."""
    words = [sys.executable, "-c", WRAPPER]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=100)
    loaded = done.stdout.split()
    assert "weft.parallel.data_parallel.ddp" in loaded
    assert len(loaded) <= 40


def test_every_command_of_the_entry_points_is_installed() -> None:
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    names = {each.name for each in entries}
    assert {"plan", "plan --calibrate", "chaos", "prove --mutants", "prove --sweep"} <= names
    for name in names:
        assert isinstance(installed_command(name), Command)
    assert set(all_commands()) == set(COMMANDS) | {name for name in names if " " not in name}


def test_a_mode_takes_all_words_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--mutants", "--help"]) == EXIT_OK
    assert "plant faults" in capsys.readouterr().out
    assert main(["plan", "--calibrate", "--help"]) == EXIT_OK
    assert "fit the constants" in capsys.readouterr().out


def test_a_package_that_cannot_be_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = importlib.metadata.EntryPoint("plan", "no_such_package.entries:PLAN", ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: (broken,))
    assert main(["plan"]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert "the entry point 'plan' (no_such_package.entries:PLAN) cannot be imported" in error


def test_a_mode_of_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    assert main(["prove", "--mutants"]) == EXIT_USER
    assert capsys.readouterr().err.startswith(
        "error: weft prove --mutants: is a command of a package"
    )


def test_every_extra_that_is_named_exists() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = [root / "README.md", *(root / "docs").rglob("*.md"), *(root / "src").rglob("*.py")]
    named = {
        extra.strip()
        for page in pages
        for extras in re.findall(r"weft-train\[([\w, -]+)\]", page.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    assert named
    assert named <= {*project["optional-dependencies"]}


def test_what_the_container_file_copies_and_installs_is_there() -> None:
    root = Path(__file__).parents[1]
    lines = (root / "Containerfile").read_text(encoding="utf-8").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert [name for name in copied if not (root / name).exists()] == []
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", "\n".join(lines))
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert project["readme"] in copied
