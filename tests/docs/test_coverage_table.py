"""The table "What a proof covers": every part of a run has a row, and every row a test that exists."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.prove.parts.names import PARTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "proof-limits.md"
TITLE = "## What a proof covers"
ROWS = (
    *("initial values", "batches and masks", "forward", "backward", "reductions"),
    *("norm and clipping", "updates by each optimizer", "buffers that training updates"),
    "the first update of a new run",
    *("learning rate", "loss scale", "saves"),
    *("resumes", "snapshots in memory", "restarts of ranks", "elastic changes", "evaluation"),
    *("generation", "export", "import", "preference pairs", "inside a site"),
    *("outer steps of sites", "the first step of the run", "recorded losses and norms"),
    *("types along mesh axes", "weft's models themselves"),
)


class Row(NamedTuple):
    """A row of the table."""

    part: str
    proved_by: str
    sizes: str
    not_covered: str
    test: str


def rows() -> Iterator[Row]:
    _, _, after = PAGE.read_text(encoding="utf-8").partition(f"{TITLE}\n")
    section, _, _ = after.partition("\n## ")
    lines = [line for line in section.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield Row(*(cell.strip() for cell in line.strip("|").split("|")))


def test_every_part_of_a_run_has_a_row() -> None:
    assert tuple(row.part for row in rows()) == ROWS


@pytest.mark.parametrize("part", PARTS)
def test_every_name_of_the_command_is_in_the_table(part: str) -> None:
    assert any(f"--what {part}`" in row.proved_by for row in rows())


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.part.replace(" ", "_"))
def test_the_test_of_a_row_exists(row: Row) -> None:
    file, _, name = row.test.strip("`").partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in functions
    assert row.sizes
