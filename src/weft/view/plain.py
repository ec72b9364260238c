"""Plain-text view of a run for logs and pipes: a line every n steps, each number with its unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from weft.view.end_summary import end_summary
from weft.view.output import ViewOutput
from weft.view.progress import (
    Event,
    Progress,
    event_text,
    loss_unit,
    run_summary,
    stage_memory,
    step_count,
)
from weft.view.quantity import clock, short_time

NUM_LINES = 50
LABEL_WIDTH = 10


class PlainView:
    """The summary, then about fifty lines a run, always with the first and the last step.

    Args:
        every: steps between two lines; None: chosen from the length of the run.
    """

    def __init__(self, file: IO[str], *, every: int | None = None) -> None:
        self.progress = Progress()
        self._output = ViewOutput(file)
        self._every = every
        self._last_printed = 0
        self._encoding = getattr(file, "encoding", None) or "utf-8"

    def handle(self, event: Event) -> None:
        self.progress.update(event)
        kind = event.get("event")
        if kind == "run":
            self._print_rows(run_summary(event))
        if kind == "end":
            self._print_last_step()
        text = event_text(event, unit=self.progress.unit)
        if text:
            self._print(f"{text}\n")
        if kind == "step" and self._is_due():
            self._print_step()
        if kind == "end":
            self._print_rows(end_summary(self.progress))

    def close(self) -> None:
        self._print_last_step()

    def _print_last_step(self) -> None:
        if self.progress.step and self.progress.num_done > self._last_printed:
            self._print_step()

    def _is_due(self) -> bool:
        """Whether the step is the first of this process, the last of the run, or the next to show."""
        is_first = len(self.progress.losses) == 1
        if is_first:
            return True
        done = self.progress.num_done
        total = self.progress.num_steps
        if done == total:
            return True
        every = self._every or round_up(total / NUM_LINES)
        return done % every == 0

    def _print_step(self) -> None:
        self._last_printed = self.progress.num_done
        line = step_line(self.progress)
        self._print(f"{line}\n")

    def _print_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        for label, text in rows:
            self._print(f"{label:<{LABEL_WIDTH}}{text}\n")

    def _print(self, text: str) -> None:
        encodable = text.encode(self._encoding, "replace").decode(self._encoding)
        self._output.write(encodable)


def step_line(progress: Progress) -> str:
    """The last step as one line."""
    step = progress.step
    parts = [
        f"step {step_count(progress)}",
        f"loss {float(step['loss']):.4f}{loss_unit(progress.unit)}",
        f"grad norm {float(step['grad_norm']):.3f}",
        f"lr {step['lr']:.2e}",
        f"{progress.tokens_per_s:,.0f} {progress.unit}/s",
        f"{short_time(progress.step_s)}/step",
    ]
    if "mfu" in step:
        parts.append(f"MFU {100 * step['mfu']:.3g}%")
    if progress.mem_bytes:
        parts.append(f"memory {stage_memory(progress.mem_bytes)}")
    parts.append(f"{clock(progress.left_s)} left")
    return "  ".join(parts)


def round_up(steps: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 ..."""
    size = 1
    while 10 * size <= steps:
        size *= 10
    for factor in (1, 2, 5):
        if factor * size >= steps:
            return factor * size
    return 10 * size
