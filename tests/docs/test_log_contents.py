"""The list of contents in docs/LOG.md has every heading of the page, in the order of the page, and no other."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "LOG.md"
TITLE = "## Contents\n"
HEADING = re.compile(r"^(#{2,}) (.+)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """The anchor that GitHub and MkDocs make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entry(marks: str, heading: str) -> str:
    """The line of a heading in the list of contents."""
    indent = "    " * (len(marks) - 2)
    return f"{indent}- [{heading}](#{anchor(heading)})"


def test_contents_of_the_log_are_its_headings() -> None:
    _, _, after = PAGE.read_text(encoding="utf-8").partition(TITLE)
    contents, _, _ = after.partition("\n## ")
    headings = HEADING.findall(after)
    assert contents.strip().splitlines() == [entry(marks, text) for marks, text in headings]
