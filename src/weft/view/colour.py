"""Coloured picture of a timeline for a terminal: `view.text` with a style for each kind of action."""

from __future__ import annotations

from rich.text import Text

from weft.schedule.timeline import Timeline
from weft.view.text import picture, wrapped

STYLES = {
    "F": "black on bright_blue",
    "B": "black on green",
    "I": "black on cyan",
    "W": "black on yellow",
    "": "dim",
}


def paint(timeline: Timeline, *, width: int = 240, columns: int | None = None) -> Text:
    """The picture of `view.text.draw`, coloured; rows are clipped and the footer is wrapped to
    `columns`.
    """
    drawn = picture(timeline, width=width)
    painted = Text(no_wrap=True)
    for rank, row in enumerate(drawn.rows):
        line = Text(drawn.title(rank))
        for cell in row:
            line.append(cell.text, style=STYLES[cell.kind])
        if columns is not None:
            line.truncate(columns, overflow="ellipsis")
        painted.append_text(line)
        painted.append("\n")
    for line_text in drawn.footer:
        painted.append("\n".join(wrapped(line_text, columns)) + "\n", style="dim")
    return painted
