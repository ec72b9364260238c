"""Terminology: plain technical English, first lines of modules, a glossary with sources."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PRIVATE_VOCABULARY = re.compile(
    r"""\bOwns\b|(?i:\bnobody|\bwhoever\b|\bsomebody|\bis\ told\b|\btells\ of\b|\bthe\ door\b|\bat\ the\ door\b
    |\bmend(s|ed|ing)?\b|\bgiv(e|es|en)\ away\b|\blets?\ go\ of\b|\bcomes?\ on\ demand\b|\byours\ to\b|\blast\ word\b
    |\bstrangers?\b|\bhalf-told\b|\bbreath\b|\bdearest\b)""",
    re.VERBOSE,
)
FIRST_LINE = re.compile(r'\Ar?"""(.*?)(?:"""|\n)')
MAX_TERMS = 70


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of comments and string literals of a Python file, with their numbers."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def private_words(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Place and text of the lines with words that are not plain English."""
    for number, line in lines:
        if PRIVATE_VOCABULARY.search(line):
            yield f"{relative(path)}:{number}: {line.strip()}"


@pytest.mark.parametrize("files", [SOURCES, TESTS, BENCHMARKS], ids=["src", "tests", "others"])
def test_comments_docstrings_and_messages_use_no_private_vocabulary(files):
    found = []
    for path in files:
        if path == Path(__file__):
            continue
        if not PRIVATE_VOCABULARY.search(path.read_text(encoding="utf-8")):
            continue  # without the cost of tokenizing
        found += private_words(path, prose(path))
    assert not found


def test_pages_use_no_private_vocabulary():
    found = []
    for path in PAGES:
        lines = path.read_text(encoding="utf-8").splitlines()
        found += private_words(path, enumerate(lines, start=1))
    assert not found


def test_every_module_says_in_its_first_line_what_it_contains():
    found = []
    for path in SOURCES:
        (first_line,) = FIRST_LINE.findall(path.read_text(encoding="utf-8")) or [""]
        is_sentence = len(first_line.split()) >= 3
        begins_well = re.match(r"[A-Z0-9`]|weft", first_line)
        if not (is_sentence and begins_well):
            found.append(f"{relative(path)}: {first_line!r}")
    assert not found


def test_the_glossary_has_at_most_seventy_terms_each_with_a_source():
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [
        line.strip("|").split("|") for line in lines if line.startswith("|") and "---" not in line
    ]
    stripped = [[cell.strip() for cell in row] for row in rows]
    terms = [row for row in stripped if row[0] != "term"]
    assert 40 <= len(terms) <= MAX_TERMS
    for cells in terms:
        assert len(cells) == 3
        assert all(cells)
    names = [cells[0] for cells in terms]
    assert len(set(names)) == len(names)
