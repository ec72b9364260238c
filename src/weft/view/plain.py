"""Plain-text view of a run for logs and pipes: a line every n steps, each number with its unit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from weft.view.end_summary import end_summary
from weft.view.output import ViewOutput
from weft.view.progress import Event, Progress, event_text, run_summary
from weft.view.step_lines import StepLines

LABEL_WIDTH = 10


class PlainView:
    """The summary, then lines of steps, always with the first and the last step.

    Args:
        every: steps between two lines; 0: about fifty lines a run.
        now: a clock in seconds.
    """

    def __init__(
        self, file: IO[str], *, every: int = 0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.progress = Progress()
        self._output = ViewOutput(file)
        self._lines = StepLines(every)
        self._now = now
        self._start_s = now()
        self._encoding = getattr(file, "encoding", None) or "utf-8"

    def handle(self, event: Event) -> None:
        self.progress.update(event)
        kind = event.get("event")
        if kind == "run":
            self._print_rows(run_summary(event))
        self._print_lines(self._lines.before(event))
        text = event_text(event, unit=self.progress.unit)
        if text:
            self._print(f"{text}\n")
        if kind == "step":
            elapsed_s = self._now() - self._start_s
            self._print_lines(self._lines.of_step(self.progress, elapsed_s=elapsed_s))
        if kind == "end":
            self._print_rows(end_summary(self.progress))

    def close(self) -> None:
        self._print_lines(self._lines.last())

    def _print_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._print(f"{line}\n")

    def _print_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        for label, text in rows:
            self._print(f"{label:<{LABEL_WIDTH}}{text}\n")

    def _print(self, text: str) -> None:
        encodable = text.encode(self._encoding, "replace").decode(self._encoding)
        self._output.write(encodable)
