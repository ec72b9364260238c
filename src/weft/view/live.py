"""Live view of a run on a terminal: a panel that is redrawn below the log lines; plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.view.end_summary import end_summary
from weft.view.output import ViewOutput
from weft.view.plain import PlainView
from weft.view.progress import (
    Event,
    Progress,
    View,
    event_text,
    loss_unit,
    run_summary,
    stage_memory,
    step_count,
)
from weft.view.quantity import ASCII_BLOCKS, BLOCKS, clock, short_time, sparkline
from weft.view.step_lines import StepLines

FRAME_S = 0.1
MAX_WIDTH = 120
LABEL_WIDTH = 11

# Note [Live region]
# Panels and styles are rich's; the region that is redrawn is not rich.live.Live, for three reasons, tried with rich 15.0.
# Live hides the cursor until `stop` (ESC[?25l), so that a killed rank leaves the terminal without one. It leaves the cursor
# inside the last line of the frame, so that an error message of another process is written into the frame. And it moves up
# by the lines that it has printed, not by the rows that they take since the window became narrower: a frame of 90 and 50
# characters, redrawn at 24 columns, goes up 1 row instead of 6 and leaves the rest of the old frame behind.


def open_view(file: TextIO | None = None, *, every: int = 0) -> View:
    """The live view if `file` (default: standard output) is a terminal with a movable cursor, else
    plain lines.

    Args:
        every: steps between two lines; 0: about fifty lines a run, none on a terminal.
    """
    console = Console(file=file or sys.stdout, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console, every=every)
    return PlainView(console.file, every=every)


class LiveView:
    """A summary panel, then lines that follow the run.

    ```
     step       121/200  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  60%   0:20 elapsed, 0:13 left
     loss       2.3456 nats, evaluation 2.4012  ▇▆▅▄▄▃▃▂▂▂▁▁▁
     gradient   norm 1.234     lr 2.31e-03
     speed      12,345 tokens/s, 166 ms a step
     memory     pp0 312 MiB, pp1 298 MiB
    ```

    Args:
        every: steps between two lines above the panel; 0: none.
        now: a clock in seconds; frames are at least `FRAME_S` apart.
    """

    def __init__(
        self, console: Console, *, every: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.progress = Progress()
        self._region = LiveRegion(console)
        self._lines = StepLines(every) if every else None
        self._now = now
        self._start_s = now()
        self._drawn_at = -math.inf
        encoding = (console.encoding or "").lower()
        self._glyphs = UNICODE if encoding.startswith("utf") else ASCII

    def handle(self, event: Event) -> None:
        self.progress.update(event)
        kind = event.get("event")
        if kind == "run":
            panel = summary_panel(event, self._glyphs, width=self._width)
            self._region.print_above(panel)
        now_s = self._now()
        self._print_steps(event, elapsed_s=now_s - self._start_s)
        text = event_text(event, unit=self.progress.unit)
        if text:
            self._region.print_above(Text(text))
        if kind == "end":
            for label, end_text in end_summary(self.progress):
                self._region.print_above(_line(label, end_text))
        if kind != "step" or now_s - self._drawn_at >= FRAME_S:
            self._draw(now_s)

    def close(self) -> None:
        if self.progress.run or self.progress.step:
            self._draw(self._now())

    def _print_steps(self, event: Event, *, elapsed_s: float) -> None:
        """Print the lines of steps that are due at an event."""
        if self._lines is None:
            return
        due = self._lines.before(event)
        if event.get("event") == "step":
            due = self._lines.of_step(self.progress, elapsed_s=elapsed_s)
        for line in due:
            self._region.print_above(Text(line))

    @property
    def _width(self) -> int:
        return min(self._region.console.width, MAX_WIDTH)

    def _draw(self, now_s: float) -> None:
        self._drawn_at = now_s
        elapsed_s = now_s - self._start_s
        lines = progress_lines(self.progress, self._glyphs, width=self._width, elapsed_s=elapsed_s)
        self._region.draw(lines)


class LiveRegion:
    """Lines of a terminal that are redrawn in place, below everything printed before; see Note
    [Live region].

    Between two writes the cursor is visible and at the start of the line below the region, so that
    the terminal is usable after any end of the process. Each frame is one write, clipped to the
    present size of the terminal.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._output = ViewOutput(console.file)
        self._widths: tuple[int, ...] = ()

    def draw(self, lines: Sequence[Text]) -> None:
        """Replace the region by `lines`, as many as there is room for."""
        width, height = self.console.size
        num_shown = max(height - 1, 1)
        clipped: list[Text] = []
        widths: list[int] = []
        for line in lines[:num_shown]:
            shown = _clip(line, width - 1)
            clipped.append(shown)
            widths.append(shown.cell_len)
        self.print_above(*clipped)
        self._widths = tuple(widths)

    def print_above(self, *renderables: RenderableType) -> None:
        """Erase the region and print permanently; the next `draw` restores the region below."""
        erase = self._erase_code(self.console.width)
        text = self._render(*renderables)
        self._write(erase + text)
        self._widths = ()

    def _erase_code(self, width: int) -> str:
        """Control codes to the first row of the region, which a narrower window may have wrapped,
        and to erase from there.
        """
        num_rows = 0
        for cells in self._widths:
            num_rows_of_line = math.ceil(cells / width)
            num_rows += max(1, num_rows_of_line)
        if not num_rows:
            return ""
        return f"\x1b[{num_rows}F\x1b[J"

    def _render(self, *renderables: RenderableType) -> str:
        with self.console.capture() as captured:
            for renderable in renderables:
                self.console.print(renderable)
        return captured.get()

    def _write(self, text: str) -> None:
        self._output.write(text)


def _clip(line: Text, width: int) -> Text:
    clipped = line.copy()
    clipped.truncate(max(width, 1), overflow="ellipsis")
    clipped.no_wrap = True
    return clipped


@dataclass(frozen=True)
class Glyphs:
    """Characters of the progress bar and the sparkline."""

    full: str
    empty: str
    blocks: str
    is_ascii: bool


UNICODE = Glyphs(full="━", empty="━", blocks=BLOCKS, is_ascii=False)
ASCII = Glyphs(full="#", empty=".", blocks=ASCII_BLOCKS, is_ascii=True)


def summary_panel(run: Event, glyphs: Glyphs, *, width: int) -> Panel:
    """Layout, model, data and batch of a run, in a box."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=LABEL_WIDTH - 2)
    grid.add_column(overflow="fold")
    for label, text in run_summary(run):
        grid.add_row(label, Text(text))
    return Panel(
        grid,
        title="[bold]weft[/bold]",
        title_align="left",
        border_style="cyan",
        width=width,
        safe_box=glyphs.is_ascii,
    )


def progress_lines(
    progress: Progress, glyphs: Glyphs, *, width: int, elapsed_s: float
) -> list[Text]:
    """The lines that follow the run, the most important first."""
    lines = [_bar_line(progress, glyphs, width=width, elapsed_s=elapsed_s)]
    if not progress.step:
        lines.append(Text(" waiting for the first step", "dim"))
        return lines
    lines.append(_loss_line(progress, glyphs, width=width))
    lines.append(_gradient_line(progress))
    lines.append(_speed_line(progress))
    if progress.mem_bytes:
        lines.append(_line("memory", stage_memory(progress.mem_bytes)))
    return lines


def _bar_line(progress: Progress, glyphs: Glyphs, *, width: int, elapsed_s: float) -> Text:
    share = _share_done(progress)
    steps = step_count(progress)
    status = _status(progress, elapsed_s)
    line = _line("step", (f"{steps}  ", "bold"))
    end = Text(f" {share:4.0%}   {status}", "dim")
    room = width - 2 - line.cell_len - end.cell_len
    bar_width = max(room, 0)
    num_full = round(share * bar_width)
    num_empty = bar_width - num_full
    line.append(glyphs.full * num_full, "green")
    line.append(glyphs.empty * num_empty, "grey37")
    line.append(end)
    return line


def _share_done(progress: Progress) -> float:
    if not progress.num_steps:
        return 0.0
    share = progress.num_done / progress.num_steps
    return min(share, 1.0)


def _status(progress: Progress, elapsed_s: float) -> str:
    status = progress.end.get("status")
    if status:
        return str(status)
    return f"{clock(elapsed_s)} elapsed, {clock(progress.left_s)} left"


def _loss_line(progress: Progress, glyphs: Glyphs, *, width: int) -> Text:
    loss = float(progress.step["loss"])
    style = "bold" if math.isfinite(loss) else "bold red"
    line = _line("loss", (f"{loss:.4f}", style), (loss_unit(progress.unit), "dim"))
    if progress.evaluation:
        line.append(", evaluation ", "dim").append(f"{progress.evaluation_loss:.4f}")
    line.append("  ")
    room = max(width - line.cell_len - 2, 0)
    curve = sparkline(progress.losses, room, blocks=glyphs.blocks)
    return line.append(curve, "cyan")


def _gradient_line(progress: Progress) -> Text:
    norm = float(progress.step["grad_norm"])
    lr = progress.step["lr"]
    return _line("gradient", ("norm ", "dim"), f"{norm:.3f}".ljust(10), ("lr ", "dim"), f"{lr:.2e}")


def _speed_line(progress: Progress) -> Text:
    return _line(
        "speed",
        f"{progress.tokens_per_s:,.0f}",
        (f" {progress.unit}/s, ", "dim"),
        short_time(progress.step_s),
        (" a step", "dim"),
    )


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    padded_label = label.ljust(LABEL_WIDTH)
    return Text.assemble(" ", (padded_label, "dim"), *parts)
