"""Follows docs/extend.md literally: adds its files to a copy of the sources, then runs its commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

import weft
from tests.programs import ProgramServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extend.md"
SOURCES = Path(weft.__file__).parents[1]
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
FILE = re.compile(r"^`([\w/.]+\.py)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TORCH = ("torch", "numpy.ma", "torch.fx.experimental.symbolic_shapes", "pydantic", "rich", "tyro")
PLACES = {
    "A schedule": "src/weft/schedule/gpipe_fifo.py",
    "A model family": "src/weft/models/narrow",
    "A parallel dimension": "src/weft/parallel/rp.py",
    "A transport": "src/weft/comm/mailbox.py",
}


@dataclass(frozen=True)
class Section:
    """Files (path -> text) and commands of one section of the page."""

    files: dict[str, str]
    commands: list[list[str]]


def sections() -> dict[str, Section]:
    """The sections of the page by title."""
    _, *parts = SECTION.split(PAGE.read_text(encoding="utf-8"))
    found: dict[str, Section] = {}
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        lines = [line for block in CONSOLE.findall(text) for line in block.splitlines()]
        commands = [shlex.split(line.removeprefix("$ ")) for line in lines]
        files = dict(FILE.findall(text))
        found[title] = Section(files, commands)
    return found


def add_files(section: Section, folder: Path) -> None:
    """A copy of the sources below `folder`, and the files of the section."""
    shutil.copytree(SOURCES, folder / "src")
    for name, text in section.files.items():
        path = folder / name
        assert not path.exists(), f"{name} would change an existing file"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def python() -> Iterator[ProgramServer]:
    """Python with torch imported, and without weft: each program imports its own copy."""
    server = ProgramServer(preload=TORCH)
    yield server
    server.close()


def run(python: ProgramServer, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """One command of the page, with the sources below `folder`."""
    environ = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "80"}
    if words[0] == "pytest":
        environ |= {"PYTEST_ADDOPTS": "-n 0 -p no:cacheprovider -m 'not slow'"}
        return python.run("", *words[1:], module="pytest", environ=environ, folder=ROOT)
    if words[0] == "weft":
        return python.run("", *words[1:], module="weft", environ=environ, folder=folder)
    assert words[0] == "python"
    script = folder / words[1]
    return python.run("", *words[2:], script=script, environ=environ, folder=folder)


def test_the_page_has_a_section_for_each_extension() -> None:
    assert list(sections()) == list(PLACES)


@pytest.mark.parametrize(
    "title",
    [
        "A schedule",
        "A parallel dimension",
        pytest.param("A model family", marks=pytest.mark.slow),
        pytest.param("A transport", marks=pytest.mark.slow),
    ],
)
def test_an_extension_is_one_file_or_folder_and_its_commands_succeed(
    title: str, tmp_path: Path, python: ProgramServer
) -> None:
    section = sections()[title]
    add_files(section, tmp_path)
    in_package = [PurePosixPath(name) for name in section.files if name.startswith("src/")]
    place = PurePosixPath(PLACES[title])
    assert all(path == place or place in path.parents for path in in_package)
    commands = [words for words in section.commands if words[0] != "pytest"]
    assert commands
    for words in commands:
        done = run(python, words, tmp_path)
        output = f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, output


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("title", PLACES)
def test_the_tests_of_the_page_find_the_extension_and_pass(
    title: str, tmp_path: Path, python: ProgramServer
) -> None:
    section = sections()[title]
    add_files(section, tmp_path)
    (words,) = [words for words in section.commands if words[0] == "pytest"]
    done = run(python, [*words, "-rA"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    added = {"A parallel dimension": "rp2"}.get(title, Path(PLACES[title]).stem)
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED")]
    assert sum(added in line for line in passed) >= 4, done.stdout


def test_redundant_ranks_that_disagree_are_reported(tmp_path: Path, python: ProgramServer) -> None:
    """The toy dimension of the page compares what it says it compares."""
    (source,) = sections()["A parallel dimension"].files.values()
    script = source + (
        "\nimport torch\n"
        "class FakeComm:\n"
        "    def all_gather(self, x, axis):\n"
        "        return torch.tensor([1.0, 2.0])\n"
        "try:\n"
        "    compare(torch.tensor(1.0), FakeComm())\n"
        "except CommError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "rp_script.py"
    path.write_text(script, encoding="utf-8")
    done = python.run(script=path, environ={**os.environ, "PYTHONPATH": str(SOURCES)})
    assert "redundant ranks disagree about the loss: [1.0, 2.0]" in done.stdout, done.stderr
