"""Texts whose answers stand out: in colour on a terminal, in brackets elsewhere; wrapped to the columns."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

STYLE = "bold green"
OPEN, CLOSE = "[", "]"
INDENT = "  "


@dataclass(frozen=True)
class TextSegment:
    """A part of a text, all of which counts in the loss, or nothing of which does."""

    text: str
    counts: bool


def marked_text(segments: Iterable[TextSegment], *, columns: int, in_colour: bool) -> str:
    """The text of the segments with those that count marked; no line is longer than `columns`."""
    text = Text()
    for segment in segments:
        if not segment.counts:
            text.append(_printable(segment.text))
        elif in_colour:
            text.append(_printable(segment.text), style=STYLE)
        else:
            text.append(f"{OPEN}{_printable(segment.text)}{CLOSE}")
    written = io.StringIO()
    console = Console(
        file=written,
        width=columns - len(INDENT),
        force_terminal=in_colour,
        color_system="standard" if in_colour else None,
        legacy_windows=False,
    )
    console.print(text, soft_wrap=False, overflow="fold")
    lines = written.getvalue().rstrip("\n").split("\n")
    return "\n".join(f"{INDENT}{line}".rstrip() for line in lines)


def _printable(text: str) -> str:
    """The text with control characters, but line ends, written out."""
    shown = ""
    for char in text.expandtabs(4):
        if char.isprintable() or char == "\n":
            shown += char
        else:
            escaped = char.encode("unicode_escape")
            shown += escaped.decode()
    return shown
