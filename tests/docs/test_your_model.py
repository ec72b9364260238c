"""Follows docs/your-model.md literally: its programs and commands, and its table of models."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.programs import WEFT, programs
from tests.user_models.sweep import LAYOUTS, MODELS
from tests.user_models.test_models import REJECTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your-model.md"
FILE = re.compile(r"^`([\w/.]+\.py)`\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_LINES_BESIDES = 30
"""Lines of code of the first program that are not the model."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def commands() -> list[list[str]]:
    blocks = CONSOLE.findall(PAGE.read_text(encoding="utf-8"))
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line.removeprefix("$ weft ")) for line in lines]


def run_all(chosen: list[list[str]], folder: Path) -> None:
    for words in chosen:
        done = programs().run(WEFT, *words, folder=folder, timeout=110)
        output = f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, output


@pytest.mark.timeout(240)
def test_the_first_program_of_the_page_is_proven(folder: Path) -> None:
    """`make slow` runs all commands."""
    programs_of_page = {path.name for path in folder.glob("*.py")}
    proofs = [words for words in commands() if words[0] == "prove"]
    first = {words[1]: words for words in reversed(proofs)}
    assert set(first) == programs_of_page == {"gpt.py", "vit.py", "two_outputs.py", "translate.py"}
    run_all([[*first["gpt.py"][:-1], "1"]], folder)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_command_of_the_page_works(folder: Path) -> None:
    run_all(commands(), folder)


def test_a_gpt_needs_thirty_lines_besides_the_model(folder: Path) -> None:
    _, besides = (folder / "gpt.py").read_text().split("# what weft needs besides the model\n")
    lines = [line for line in besides.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES_BESIDES


def test_the_table_of_the_page_says_what_is_rejected() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, title in MODELS.items():
        (row,) = re.findall(rf"^\| {re.escape(title)} \| (.*) \|$", text, re.MULTILINE)
        cells = dict(zip(LAYOUTS, row.split(" | "), strict=True))
        for layout, cell in cells.items():
            assert (cell == "rejected") == ((name, layout) in REJECTED), (name, layout)
