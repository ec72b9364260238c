"""Owns the coloured picture of a timeline for a terminal: `view.text` with a style for each kind of action."""

from __future__ import annotations

from rich.text import Text

from weft.schedule.timeline import Timeline
from weft.view.text import picture

STYLES = {"F": "black on bright_blue", "B": "black on green", "I": "black on cyan", "W": "black on yellow", "": "dim"}


def paint(timeline: Timeline, *, width: int = 240) -> Text:
    """The picture of `view.text.draw`, coloured."""
    drawn, text = picture(timeline, width=width), Text(no_wrap=True)
    for rank, row in enumerate(drawn.rows):
        text.append(drawn.title(rank))
        for cell in row:
            text.append(cell.text, style=STYLES[cell.kind])
        text.append("\n")
    return text.append("\n".join(drawn.footer) + "\n", style="dim")
