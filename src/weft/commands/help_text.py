"""Boxes of options in `--help`: a default that is nothing is not printed, or is explained by the option's own text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

START = re.compile(r"[│ ] (-h|--\w)")
"""First line of an option, in a box or, where the output has no such characters, between spaces."""
CONTINUATION = re.compile(r"[│ ]  +[^\s│]")
NO_DEFAULT = re.compile(r"\s*\(default:\s*(?:None|''|)\s*\)")
NOTHING = re.compile(r"\b(?:None|empty|nothing|none): ")
"""How descriptions say what happens without a value."""
OPTIONAL = re.compile(r"\{None\}\|(\S+)|(\S+)\|None\b")
GAP = re.compile(r"(?<=\S)  +(?=\S)")


def compact(text: str) -> str:
    """The boxes with plain metavars and without empty defaults, wrapped again at the same width.

    `--nproc INT|None   local ranks to start; None: the mesh's size (default: None)` becomes
    `--nproc INT        local ranks to start; default: the mesh's size`.
    """
    return "\n".join(_lines(text.splitlines()))


def _lines(lines: Sequence[str]) -> Iterator[str]:
    entry: list[str] = []
    goes_on = False
    for line in lines:
        starts = goes_on or START.match(line) is not None
        # the choices of an option that are longer than a line: the last part of them has the description
        text = line.strip("│ ")
        goes_on = starts and text.endswith(",") and GAP.search(text) is None
        continues = bool(entry) and not starts and CONTINUATION.match(line) is not None
        if entry and not continues:
            yield from _wrapped(entry)
            entry = []
        if (starts or continues) and not goes_on:
            entry.append(line)
        else:
            yield line
    if entry:
        yield from _wrapped(entry)


def _wrapped(entry: Sequence[str]) -> Iterator[str]:
    """One option: its flag, and its description as far as it says something."""
    first_line = entry[0]
    border = first_line[0]
    width = len(first_line)
    inner = [line[1:].rstrip("│ ").strip() for line in entry]
    flag, *beginning = GAP.split(inner[0], maxsplit=1)
    description = " ".join((*beginning, *inner[1:]))
    column = _column(entry, flag)
    texts = textwrap.wrap(_description(description), width - column - 2, break_on_hyphens=False)
    shown_flag = OPTIONAL.sub(_metavar, flag)
    head = f" {shown_flag}"
    indent = " " * (column - 1)
    if texts and len(head) + 2 < column:
        head = head.ljust(column - 1) + texts.pop(0)
    lines = [head]
    lines.extend(f"{indent}{text}" for text in texts)
    for line in lines:
        yield f"{border}{line:<{width - 2}}{border}"


def _column(entry: Sequence[str], flag: str) -> int:
    """Where descriptions begin: behind the gap of the first line, or at the second line."""
    gap = GAP.search(entry[0].rstrip("│ "))
    if gap is not None:
        return gap.end()
    if len(entry) == 1:
        return len(flag) + 4
    beginning = CONTINUATION.match(entry[1])
    assert beginning is not None, "lines of an entry continue it"
    return beginning.end() - 1


def _metavar(found: re.Match[str]) -> str:
    return found[1] or found[2]


def _description(text: str) -> str:
    """The text of an option; what it says of no value stands for a default that is nothing."""
    shortened = NO_DEFAULT.sub("", text)
    if shortened == text:
        return text
    return NOTHING.sub("default: ", shortened, count=1)
