"""Owns the few lines at the bottom of a terminal that are drawn again and again."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text


class Screen:
    """Lines that stay below everything that is printed above them.

    The cursor always rests at the start of the line below, and is never hidden: whatever ends the process, and whoever
    writes next, the terminal is in order. Each frame is one write. A frame is cut to the size that the terminal has
    now; lines that a narrower window has broken since are counted when they are erased.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._widths: tuple[int, ...] = ()

    def draw(self, lines: Sequence[Text]) -> None:
        """Put `lines` in the place of the ones before; the first ones where there is not room for all."""
        width, height = self.console.size
        kept = [_cut(line, width - 1) for line in lines[: max(height - 1, 1)]]
        self._write(self._erase(width) + self._render(*kept))
        self._widths = tuple(line.cell_len for line in kept)

    def print_above(self, *renderables: RenderableType) -> None:
        """Print for good; the lines come back with the next `draw`."""
        self._write(self._erase(self.console.width) + self._render(*renderables))
        self._widths = ()

    def _erase(self, width: int) -> str:
        rows = sum(max(-(-cells // width), 1) for cells in self._widths)
        return f"\x1b[{rows}F\x1b[J" if rows else ""

    def _render(self, *renderables: RenderableType) -> str:
        with self.console.capture() as captured:
            for renderable in renderables:
                self.console.print(renderable)
        return captured.get()

    def _write(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()


def _cut(line: Text, width: int) -> Text:
    line = line.copy()
    line.truncate(max(width, 1), overflow="ellipsis")
    line.no_wrap = True
    return line
