"""Owns what a log or a pipe shows of a run: a line every so many steps, each number with its unit."""

from __future__ import annotations

import math
from typing import IO

from weft.view.progress import Event, Progress, facts, stages, steps_of, words_of
from weft.view.quantity import clock, short_time

LINES = 50


class PlainView:
    """The header, then about fifty lines a run, the first and the last step always among them.

    A pipe that nobody reads any more silences the view; the run goes on.

    Args:
        every: steps between two lines; by default chosen from the length of the run.
    """

    def __init__(self, file: IO[str], *, every: int | None = None) -> None:
        self.progress = Progress()
        self._file, self._every, self._told = file, every, 0
        self._encoding = getattr(file, "encoding", None) or "utf-8"
        self._is_heard = True

    def handle(self, event: Event) -> None:
        self.progress.take(event)
        if event.get("event") == "run":
            self._say("".join(f"{label:<10}{text}\n" for label, text in facts(event)))
        if event.get("event") == "end":
            self._say_last()
        if words := words_of(event):
            self._say(f"{words}\n")
        if event.get("event") == "step" and self._is_due():
            self._say_step()

    def close(self) -> None:
        self._say_last()

    def _say_last(self) -> None:
        if self.progress.step and self.progress.num_done > self._told:
            self._say_step()

    def _is_due(self) -> bool:
        done, total = self.progress.num_done, self.progress.num_steps
        every = self._every or round_up(total / LINES)
        return len(self.progress.losses) == 1 or done == total or done % every == 0

    def _say_step(self) -> None:
        self._told = self.progress.num_done
        self._say(step_line(self.progress) + "\n")

    def _say(self, text: str) -> None:
        if not self._is_heard:
            return
        try:
            self._file.write(text.encode(self._encoding, "replace").decode(self._encoding))
            self._file.flush()
        except BrokenPipeError:
            self._is_heard = False


def step_line(progress: Progress) -> str:
    """The last step as one line."""
    step = progress.step
    parts = [
        f"step {steps_of(progress)}",
        f"loss {float(step['loss']):.4f} nats",
        f"grad norm {float(step['grad_norm']):.3f}",
        f"lr {step['lr']:.2e}",
        f"{step['tokens_per_s']:,.0f} tokens/s",
        f"{short_time(step['step_s'])}/step",
        *([f"memory {stages(progress.mem_bytes)}"] if progress.mem_bytes else []),
        f"{clock(progress.left_s)} left",
    ]
    return "  ".join(parts)


def round_up(steps: float) -> int:
    """The next of 1, 2, 5, 10, 20, 50 ..."""
    size: int = 10 ** max(math.floor(math.log10(steps)), 0) if steps > 1 else 1
    return next(nice * size for nice in (1, 2, 5, 10) if nice * size >= steps)
