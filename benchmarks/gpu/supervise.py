"""Sections of checks in processes of their own: one that dies or hangs costs its own row, and the next one goes on. No torch.

A worker writes a line of JSON for each check that begins, each row, and each check that ends. Where
it ends early, or a check takes longer than its limit, a new worker begins at the next check.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Row

POLL_S = 0.1
START_LIMIT_S = 120.0
"""For a worker until its first check begins: it imports torch and starts CUDA."""

MakeCommand = Callable[[int, Path], Sequence[str]]
"""The number of the first check and the file for its lines -> the command of a worker."""


@dataclass
class Progress:
    """What the lines of one worker say so far.

    Attributes:
        current: name of the check that runs; "" before the first.
        next_check: number of the check after the last one that has begun.
        deadline_s: time.monotonic() at which the worker is killed.
        is_done: whether it has no further check.
    """

    next_check: int
    deadline_s: float
    current: str = "start"
    is_done: bool = False
    rows: list[Row] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> None:
        """Read one line."""
        if line["kind"] == "begin":
            self.current = line["name"]
            self.next_check = line["number"] + 1
            self.deadline_s = time.monotonic() + line["limit_s"]
        elif line["kind"] == "row":
            row = Row(line["name"], line["value"], line["is_ok"])
            self.rows.append(row)
        elif line["kind"] == "done":
            self.is_done = True


def run_section(make_command: MakeCommand, folder: Path, *, until_s: float) -> Iterator[Row]:
    """The rows of one section, as they come.

    Args:
        until_s: time.monotonic() at which the section is cut off.
    """
    first = 0
    for attempt in range(1000):
        lines = folder / f"lines-{time.monotonic_ns()}-{attempt}.jsonl"
        lines.touch()
        begin_s = time.monotonic()
        progress = Progress(first, begin_s + START_LIMIT_S)
        yield from _run_worker(make_command(first, lines), lines, progress, until_s=until_s)
        if progress.is_done or time.monotonic() >= until_s:
            return
        if progress.current == "start":
            return  # it cannot start: another one could not either
        first = progress.next_check


def _run_worker(
    command: Sequence[str],
    lines: Path,
    progress: Progress,
    *,
    until_s: float,
) -> Iterator[Row]:
    log_path = lines.with_suffix(".log")
    with log_path.open("wb") as log, lines.open() as reader:
        worker = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        why = ""
        while not why:
            has_ended = worker.poll() is not None
            for text in reader:
                progress.take(json.loads(text))
            yield from progress.rows
            progress.rows.clear()
            if progress.is_done and has_ended:
                break
            if has_ended:
                why = f"its process ended with code {worker.returncode}"
            elif time.monotonic() >= until_s:
                why = "left out: no time left"
            elif time.monotonic() >= progress.deadline_s:
                why = "killed: past its time limit"
            else:
                time.sleep(POLL_S)
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    if why and not progress.is_done:
        tail = log_path.read_text(errors="replace").strip()[-300:]
        yield Row(progress.current, f"{why}; {tail}", is_ok=False)
