"""Owns how far a long piece of work has come: a bar on a terminal, a line every tenth everywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
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

LINES = 10
SILENT_BYTES = 2**24
"""Work of less than that is over before lines would help."""


class Bar:
    """Bytes done of all bytes, for one kind of work after the other; on standard error, or on `file`."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file or sys.stderr, highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, int] = {}
        self._progress: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `what`."""
        if self._progress is not None:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=total)
            self._progress.update(self._tasks[what], completed=done)
        elif total >= SILENT_BYTES and (tenth := LINES * done // total) > self._told.get(what, 0):
            self._told[what] = tenth
            self._console.print(f"{what}: {100 * tenth // LINES}% of {total / 1e6:,.1f} MB", soft_wrap=True)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()
