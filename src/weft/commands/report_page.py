"""`weft report`: runs as one self-contained HTML page, as a picture or as a table of numbers. Imports no torch."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.commands.run_list import run_folder_of
from weft.commands.status import run_status
from weft.config.command_options import read_options
from weft.config.schema import ConfigSection
from weft.errors import EXIT_OK, Fault, UserError
from weft.report.charts import charts
from weft.report.page import report_page
from weft.report.recorded_values import COLUMNS, RunRecord
from weft.report.svg_charts import picture
from weft.view.quantity import memory

NAME = "weft report"
USAGE = "RUN [RUN ...] [--out FILE.html] [--svg FILE.svg] [--csv FILE.csv]"
LINE = "show runs on one page: curves, memory, proof, events, config"
MAX_RUNS = 8
FILE = "report.html"


class ReportOptions(ConfigSection):
    """Where a report is written."""

    out: str = Field(
        "",
        description=f"the page; default: {FILE} in the folder of the run; of several runs, in this folder",
    )
    svg: str = Field("", description="the charts as one picture, too")
    csv: str = Field(
        "", description="the numbers of every step, too: a row for each step of each run"
    )


def report(words: Sequence[str]) -> int:
    """Write the report of one run, or of several over each other.

    Raises:
        UserError: no run is named, a folder holds none, or a file cannot be written.
    """
    if wants_help(words):
        return show_help(ReportOptions(), f"{NAME} {USAGE}", LINE)
    options, places = read_options(words, ReportOptions)
    if not 1 <= len(places) <= MAX_RUNS:
        got, need = " ".join(places) or "nothing", f"1 to {MAX_RUNS} run folders"
        raise UserError(Fault(NAME, "takes run folders", got=got, need=need, fix="see weft runs"))
    folders = [run_folder_of(place, command=NAME) for place in places]
    page = Path(options.out) if options.out else _page_of(folders)
    files = (
        ("out", str(page), ".html"),
        ("svg", options.svg, ".svg"),
        ("csv", options.csv, ".csv"),
    )
    for key, file, suffix in files:
        if file and Path(file).suffix != suffix:
            fix = f"--{key} report{suffix}"
            raise UserError(Fault(key, "has another ending", got=file, need=suffix, fix=fix))
    now_s = time.monotonic()
    runs = [
        RunRecord.read(folder, state=run_status(folder, now_s=now_s).state) for folder in folders
    ]
    _write("out", page, lambda: report_page(runs))
    if options.svg:
        marks = runs[0].marks if len(runs) == 1 else ()
        title = ", ".join(run.name for run in runs)
        _write("svg", Path(options.svg), lambda: picture(charts(runs), title=title, marks=marks))
    if options.csv:
        _write_numbers(Path(options.csv), runs)
    return EXIT_OK


def _page_of(folders: Sequence[Path]) -> Path:
    return folders[0] / FILE if len(folders) == 1 else Path(FILE)


def _write(key: str, file: Path, make: Callable[[], str]) -> None:
    """Write a text beside the file and move it there, so that a reader never sees half of it."""
    text = make()
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    except OSError as error:
        raise _unwritable(key, file, error) from None
    print_result(f"{file}: {memory(file.stat().st_size)}")


def _write_numbers(file: Path, runs: Sequence[RunRecord]) -> None:
    try:
        with file.open("w", newline="", encoding="utf-8") as opened:
            writer = csv.writer(opened)
            writer.writerow(("run", "step", *COLUMNS))
            for run in runs:
                columns = (run.columns[name] for name in COLUMNS)
                for step, *values in zip(run.steps.tolist(), *columns, strict=True):
                    writer.writerow((run.name, step, *map(_cell, values)))
    except OSError as error:
        raise _unwritable("csv", file, error) from None
    print_result(f"{file}: {sum(len(run.steps) for run in runs):,} steps")


def _cell(value: float) -> str:
    """A number that reads back as itself; empty where a step has none."""
    return "" if math.isnan(value) else repr(float(value))


def _unwritable(key: str, file: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    fix = f"--{key} FILE in a folder that you may write to"
    return UserError(Fault(key, f"cannot be written: {reason}", got=repr(str(file)), fix=fix))
