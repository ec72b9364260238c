"""Which steps of a run get a line on the screen: the first, the last, every n-th, and those that something follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from weft.view.progress import Event, Progress, loss_unit, stage_memory, step_count
from weft.view.quantity import clock, short_time

NUM_LINES = 50
"""Lines of a run, where the number of steps between two is not given."""
MAX_WAITING = 64
"""Newest steps whose lines are kept: a save is reported some steps after its own."""
REWARDS = {
    "rewards_margins": "margin {:.3f}",
    "rewards_accuracies": "right {:.0%}",
    "z0": "z0 {:.3f}",
}
"""Fields of a step on answers -> what its line says."""
FOLLOWED = ("eval", "save", "save_failed", "guard", "sample")
"""Events whose step gets a line."""


class StepLines:
    """Chooses the lines of steps, in their order, each at most once.

    Args:
        every: steps between two lines; 0: chosen from the length of the run, about fifty a run.
    """

    def __init__(self, every: int = 0) -> None:
        self._every = every
        self._waiting: deque[tuple[int, str]] = deque(maxlen=MAX_WAITING)
        self._last_shown = 0
        self._awaited = 0  # the step of a guard's event, which comes before that of the step

    def of_step(self, progress: Progress, *, elapsed_s: float) -> Iterator[str]:
        """The line of the step that was added to the progress, if it is due."""
        number = progress.num_done
        self._waiting.append((number, step_line(progress, elapsed_s=elapsed_s)))
        if self._is_due(progress) or number == self._awaited:
            yield from self._line_of(number)

    def before(self, event: Event) -> Iterator[str]:
        """The line of the step that an event follows, unless it was shown."""
        kind = event.get("event")
        if kind in ("resume", "restart"):  # later steps are trained again
            self._waiting.clear()
            self._last_shown = min(self._last_shown, int(event.get("step") or 0))
        elif kind in FOLLOWED and isinstance(step := event.get("step"), int):
            self._awaited = step
            yield from self._line_of(step)
        elif kind == "end":
            yield from self.last()

    def last(self) -> Iterator[str]:
        """The line of the newest step, unless it was shown."""
        if self._waiting:
            yield from self._line_of(self._waiting[-1][0])

    def _line_of(self, number: int) -> Iterator[str]:
        if number <= self._last_shown:
            return
        for step, line in self._waiting:
            if step == number:
                self._last_shown = number
                yield line

    def _is_due(self, progress: Progress) -> bool:
        """Whether the step is the first of this process, the last of the run, or the next to show."""
        total = progress.num_steps
        if len(progress.losses) == 1 or progress.num_done == total:
            return True
        every = self._every or round_up(total / NUM_LINES)
        return progress.num_done % every == 0


def step_line(progress: Progress, *, elapsed_s: float) -> str:
    """The last step as one line; the loss of the last evaluation stands beside its own.

    Args:
        elapsed_s: since the start of this process.
    """
    step = progress.step
    parts = [
        f"step {step_count(progress)}",
        f"loss {float(step['loss']):.4f}{loss_unit(progress.unit)}",
    ]
    for field, text in REWARDS.items():
        if field in step:
            parts.append(text.format(step[field]))
    if progress.evaluation:
        parts.append(f"evaluation {progress.evaluation_loss:.4f}")
    parts += [
        f"grad norm {float(step['grad_norm']):.3f}",
        f"lr {step['lr']:.2e}",
        f"{progress.tokens_per_s:,.0f} {progress.unit}/s",
        f"{short_time(progress.step_s)}/step",
    ]
    if "mfu" in step:
        parts.append(f"MFU {100 * step['mfu']:.3g}%")
    if progress.mem_bytes:
        parts.append(f"memory {stage_memory(progress.mem_bytes)}")
    parts += [f"{clock(elapsed_s)} elapsed", f"{clock(progress.left_s)} left"]
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
