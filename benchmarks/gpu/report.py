"""The report of the GPU checks: checks, rows, their verdicts, a table and a JSON file. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

LIMIT_S = 180.0


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
    """

    device: str
    is_rehearsal: bool
    folder: Path


@dataclass(frozen=True)
class Check:
    """One check, which yields rows.

    Attributes:
        limit_s: after which its process is killed.
    """

    name: str
    run: Callable[[Settings], Iterable[Row]]
    limit_s: float = LIMIT_S


def rows_of(check: Check, settings: Settings) -> Iterator[Row]:
    """The rows of a check; an error in it is a failed row."""
    try:
        yield from check.run(settings)
    except Exception as error:  # noqa: BLE001 - the other checks still run
        yield Row(check.name, f"{type(error).__name__}: {str(error)[:300]}", is_ok=False)


@dataclass
class Report:
    """Rows as they come, printed at once, by section."""

    sections: dict[str, list[Row]] = field(default_factory=dict)

    def begin(self, title: str) -> None:
        """Print the title of a section."""
        self.sections[title] = []
        print(f"\n{title}", flush=True)

    def add(self, title: str, row: Row) -> None:
        """Note and print a row."""
        self.sections[title].append(row)
        print(row, flush=True)

    @property
    def rows(self) -> list[Row]:
        """The rows of all sections."""
        return [row for rows in self.sections.values() for row in rows]

    @property
    def failures(self) -> list[Row]:
        """Rows that are not as they must be."""
        return [row for row in self.rows if row.is_ok is False]

    def write(self, path: Path) -> None:
        """Write all rows as JSON."""
        sections = {}
        for title, rows in self.sections.items():
            sections[title] = [asdict(row) for row in rows]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sections, indent=1) + "\n")
