"""Texts of a proof's report: ranks, and lines of 80 columns. No torch."""

from __future__ import annotations

import textwrap

MAX_RANKS = 16
WIDTH = 80


def ranks_text(ranks: tuple[int, ...]) -> str:
    """The ranks by number; the first of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = " ".join(map(str, ranks[:MAX_RANKS]))
    num_more = len(ranks) - MAX_RANKS
    more = f" and {num_more} more" if num_more > 0 else ""
    return f"ranks {shown}{more}"


def wrapped(line: str) -> list[str]:
    """The line in pieces of at most 80 columns; a command stays whole."""
    if len(line) <= WIDTH or line.lstrip().startswith("weft "):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
