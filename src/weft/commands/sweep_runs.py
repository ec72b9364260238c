"""The runs of a sweep, one after the other, each as `weft train` in a process of its own. A failed one does not end the rest."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from weft.config.grid import GridPoint
from weft.config.run import Run
from weft.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, EXIT_QUIT, counted, printable
from weft.run.signals import StopRequest
from weft.start.messages import print_error

NEW = "not started"
POLL_S = 0.1
INTERRUPT_S = 10.0
"""Time in which a run ends after Ctrl-C, which it gets from the terminal; then it gets one from here."""
ENDS_SWEEP = (EXIT_PREEMPTED, EXIT_INTERRUPTED, EXIT_QUIT)
"""Exit codes of a run after which no further one is started."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep before it starts.

    Attributes:
        words: of `weft train`.
        run: what they say.
        state: of its folder, as `weft status` says it, or NEW.
        is_finished: whether there is nothing left to do.
    """

    point: GridPoint
    folder: Path
    words: tuple[str, ...]
    run: Run
    state: str
    is_finished: bool


def train_all(planned: Sequence[PlannedRun], output: TextIO, *, again: str) -> int:
    """Train the runs that are not finished; 0 when each of them has had its turn, failed ones too.

    Args:
        output: where the runs print.
        again: the command that goes on after a stop.

    Returns:
        75 if this process was asked to stop: the run under way has saved.
    """
    failed: list[str] = []
    with StopRequest() as stop:
        for number, run in enumerate(planned, start=1):
            what = " is finished already" if run.is_finished else f", in {run.folder}"
            output.write(
                printable(f"run {number} of {len(planned)}: {run.point.name}{what}") + "\n"
            )
            output.flush()
            if run.is_finished:
                continue
            try:
                code = EXIT_PREEMPTED if stop.requested else _train(run, output, stop)
            except KeyboardInterrupt:
                print_error(f"interrupted; go on: {again}")
                raise
            if code in ENDS_SWEEP:
                print_error(f"stopped; go on: {again}")
                return code
            if code != EXIT_OK:
                failed.append(run.point.name)
                print_error(
                    printable(f"error: the run {run.point.name} failed with exit code {code}")
                )
    if failed:
        names = ", ".join(failed)
        print_error(printable(f"{counted(len(failed), 'run')} failed: {names}; try again: {again}"))
    return EXIT_OK


def _train(run: PlannedRun, output: TextIO, stop: StopRequest) -> int:
    """Train one run to its end; the exit code. A request to stop is passed on to it."""
    child = subprocess.Popen(  # noqa: S603 - this Python, with this program
        [sys.executable, "-m", "weft", "train", *run.words], stdin=subprocess.DEVNULL, stdout=output
    )
    is_told = False
    try:
        while True:
            try:
                return child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if stop.requested and not is_told:
                    is_told = True
                    child.send_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        _end_after_interrupt(child)
        raise


def _end_after_interrupt(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(INTERRUPT_S)
    except subprocess.TimeoutExpired:  # the signal was sent to this process alone
        child.send_signal(signal.SIGINT)
        child.wait()
