"""CSV: RUN/metrics.csv, one row a step, evaluation or save, one column a series."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from weft.checkpoint.disk import replace_file
from weft.track.series import all_series
from weft.track.tracker import TrackedRun

FILE = "metrics.csv"
COLUMNS = ("step", *all_series())


class CsvTable:
    """Appends rows to a table; texts are in events.jsonl alone."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """A row; series of single stages and blocks have no column."""
        if values.keys().isdisjoint(COLUMNS):
            return
        self._writer.writerow({"step": step, **values})
        self._file.flush()

    def text(self, step: int, kind: str, text: str) -> None:
        """Leave texts out of the table."""

    def close(self, status: str) -> None:
        """Close the file."""
        self._file.close()


def open_tracker(run: TrackedRun, *, first_step: int) -> CsvTable:
    """The table with the rows before `first_step`."""
    path = run.folder / FILE
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows(_rows_before(path, first_step))
    replace_file(path, text.getvalue())
    return CsvTable(path.open("a", encoding="utf-8", newline=""))


def _rows_before(path: Path, first_step: int) -> Iterator[dict[str, str]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if set(row) == set(COLUMNS) and int(row["step"]) < first_step:
                yield row
