"""Progress of long file work in bytes: a rich progress bar on a terminal, one line every 10% elsewhere."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

NUM_LINES = 10
MIN_BYTES_FOR_LINES = 2**24
"""Less work than this ends before lines are useful."""


class ByteProgress:
    """Bytes done of all bytes, one bar for each kind of work; on standard error, or on `file`."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file or sys.stderr, highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._tenths_printed: dict[str, int] = {}
        self._bars: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )

    def show(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `what` are done."""
        if self._bars is not None:
            self._update_bar(self._bars, what, done, total)
        elif total >= MIN_BYTES_FOR_LINES:
            self._print_line(what, done, total)

    def _update_bar(self, bars: Progress, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = bars.add_task(what, total=total)
        task = self._tasks[what]
        bars.update(task, completed=done)

    def _print_line(self, what: str, done: int, total: int) -> None:
        tenths = NUM_LINES * done // total
        already_printed = self._tenths_printed.get(what, 0)
        if tenths <= already_printed:
            return
        self._tenths_printed[what] = tenths
        percent = 100 * tenths // NUM_LINES
        megabytes = total / 1e6
        line = f"{what}: {percent}% of {megabytes:,.1f} MB"
        self._console.print(line, soft_wrap=True)

    def __enter__(self) -> ByteProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bars is not None:
            self._bars.stop()
