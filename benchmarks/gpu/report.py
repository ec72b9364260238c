"""The report of the GPU checks: rows, their verdicts, and the exit code."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        is_ok: None where there is nothing to judge, such as a speed.
    """

    name: str
    value: str
    is_ok: bool | None = None

    def __str__(self) -> str:
        verdict = {None: "     ", True: "ok   ", False: "FAIL "}[self.is_ok]
        return f"{verdict} {self.name:60} {self.value}"


@dataclass(frozen=True)
class Settings:
    """Where and how large the checks are.

    Attributes:
        device: "cuda:0", or "cpu" for a rehearsal.
        is_rehearsal: tiny models and few layouts.
        folder: for files of the checks.
        deadline_s: time.monotonic() after which no section begins.
    """

    device: str
    is_rehearsal: bool
    folder: Path
    deadline_s: float


Section = Callable[[Settings], Iterator[Row]]


@dataclass
class Report:
    """Rows as they come, printed at once."""

    rows: list[Row] = field(default_factory=list)

    def run(self, title: str, section: Section, settings: Settings) -> None:
        """Run a section; an error in it is a failed row, and so is a section that finds no time."""
        print(f"\n{title}", flush=True)
        if time.monotonic() > settings.deadline_s:
            self.add(Row(title, "left out: no time left", is_ok=False))
            return
        start = time.monotonic()
        try:
            for row in section(settings):
                self.add(row)
        except Exception as error:  # noqa: BLE001 - the other sections still run
            traceback.print_exc()
            self.add(Row(title, f"{type(error).__name__}: {str(error)[:200]}", is_ok=False))
        print(f"      {time.monotonic() - start:.1f} s", flush=True)

    def add(self, row: Row) -> None:
        """Note and print a row."""
        self.rows.append(row)
        print(row, flush=True)

    @property
    def failures(self) -> list[Row]:
        """Rows that are not as they must be."""
        return [row for row in self.rows if row.is_ok is False]
