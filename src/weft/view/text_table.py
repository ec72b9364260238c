"""A small table of texts: as aligned lines for a terminal, and as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class TextTable:
    """Rows of texts below a title.

    Attributes:
        columns: their names; the first column is aligned to the left, the others to the right.
        note: a sentence below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def lines(self) -> list[str]:
        """Title, names and rows, aligned, two spaces apart."""
        every = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*every, strict=True)]
        lines = [self.title]
        lines.extend(f"  {_aligned(row, widths)}".rstrip() for row in every)
        return [*lines, *([f"  {self.note}"] if self.note else [])]

    @property
    def html(self) -> str:
        """The table, wide ones scroll."""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.columns)
        body = "".join(f"<tr>{_cells(row)}</tr>" for row in self.rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f'<h2>{escape(self.title)}</h2><div class="wide">{table}</div>{note}'


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = row
    cells = [first.ljust(widths[0])]
    cells.extend(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
    return "  ".join(cells)


def _cells(row: Sequence[str]) -> str:
    first, *others = row
    cells = "".join(f"<td>{escape(text)}</td>" for text in others)
    return f'<th scope="row">{escape(first)}</th>{cells}'
