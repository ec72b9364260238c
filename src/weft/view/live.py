"""Owns what a person sees while a run goes: a live panel on a terminal, plain lines everywhere else."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from weft.view.plain import PlainView
from weft.view.progress import Event, Progress, View, facts, stages, steps_of, words_of
from weft.view.quantity import ASCII_BLOCKS, BLOCKS, clock, short_time, sparkline
from weft.view.screen import Screen

FRAME_S = 0.1
WIDEST = 120
LABEL = 11
PER_STEP = (" a step", "dim")


def open_view(file: TextIO | None = None) -> View:
    """The live view where `file` (default: standard output) is a terminal with a movable cursor, else plain lines."""
    console = Console(file=file or sys.stdout, highlight=False)
    return LiveView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView(console.file)


class LiveView:
    """A header, then lines that follow the run.

    ```
     step       121/200  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  60%   0:13 left
     loss       2.3456 nats  ▇▆▅▄▄▃▃▂▂▂▁▁▁
     gradient   norm 1.234     lr 2.31e-03
     speed      12,345 tokens/s, 166 ms a step
     memory     stage 0 312 MiB, 1 298 MiB
    ```

    Args:
        now: a clock in seconds; frames are at least `FRAME_S` apart.
    """

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        self.progress = Progress()
        self._screen, self._now, self._drawn_at = Screen(console), now, -math.inf
        self._marks = UNICODE if (console.encoding or "").lower().startswith("utf") else ASCII

    def handle(self, event: Event) -> None:
        self.progress.take(event)
        if event.get("event") == "run":
            self._screen.print_above(header(event, self._marks, width=self._width))
        if words := words_of(event):
            self._screen.print_above(Text(words))
        if event.get("event") != "step" or self._now() - self._drawn_at >= FRAME_S:
            self._draw()

    def close(self) -> None:
        if self.progress.run or self.progress.step:
            self._draw()

    @property
    def _width(self) -> int:
        return min(self._screen.console.width, WIDEST)

    def _draw(self) -> None:
        self._drawn_at = self._now()
        self._screen.draw(frame(self.progress, self._marks, width=self._width))


@dataclass(frozen=True)
class Marks:
    """What lines and columns are drawn with."""

    full: str
    empty: str
    blocks: str
    is_plain: bool


UNICODE = Marks(full="━", empty="━", blocks=BLOCKS, is_plain=False)
ASCII = Marks(full="#", empty=".", blocks=ASCII_BLOCKS, is_plain=True)


def header(run: Event, marks: Marks, *, width: int) -> Panel:
    """What is trained, in a box."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True, min_width=LABEL - 2)
    grid.add_column(overflow="fold")
    for label, text in facts(run):
        grid.add_row(label, Text(text))
    title = "[bold]weft[/bold]"
    return Panel(grid, title=title, title_align="left", border_style="cyan", width=width, safe_box=marks.is_plain)


def frame(progress: Progress, marks: Marks, *, width: int) -> list[Text]:
    """The lines that follow the run, the most wanted first."""
    if not progress.step:
        return [_bar_line(progress, marks, width=width), Text(" the first step is under way", "dim")]
    step = progress.step
    norm, rate = f"{float(step['grad_norm']):.3f}", f"{step['lr']:.2e}"
    lines = [
        _bar_line(progress, marks, width=width),
        _loss_line(progress, marks, width=width),
        _line("gradient", ("norm ", "dim"), f"{norm:<10}", ("lr ", "dim"), rate),
        _line("speed", f"{step['tokens_per_s']:,.0f}", (" tokens/s, ", "dim"), short_time(progress.step_s), PER_STEP),
    ]
    return [*lines, _line("memory", stages(progress.mem_bytes))] if progress.mem_bytes else lines


def _bar_line(progress: Progress, marks: Marks, *, width: int) -> Text:
    done, total = progress.num_done, progress.num_steps
    share = min(done / total, 1.0) if total else 0.0
    before = _line("step", (f"{steps_of(progress)}  ", "bold"))
    after = Text(f" {share:4.0%}   {_status(progress)}", "dim")
    room = max(width - 2 - before.cell_len - after.cell_len, 0)
    full = round(share * room)
    return before.append(marks.full * full, "green").append(marks.empty * (room - full), "grey37").append(after)


def _status(progress: Progress) -> str:
    return str(progress.end.get("status", "")) or f"{clock(progress.left_s)} left"


def _loss_line(progress: Progress, marks: Marks, *, width: int) -> Text:
    loss = float(progress.step["loss"])
    line = _line("loss", (f"{loss:.4f}", "bold" if math.isfinite(loss) else "bold red"), (" nats  ", "dim"))
    course = sparkline(progress.losses, max(width - line.cell_len - 2, 0), blocks=marks.blocks)
    return line.append(course, "cyan")


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble(" ", (label.ljust(LABEL), "dim"), *parts)
