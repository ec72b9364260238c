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
            style = STYLES[cell.kind]
            line.append(cell.text, style=style)
        if columns is not None:
            line.truncate(columns, overflow="ellipsis")
        painted.append_text(line)
        painted.append("\n")
    for footer_line in drawn.footer:
        for line_text in wrapped(footer_line, columns):
            painted.append(f"{line_text}\n", style="dim")
    return painted
