"""`weft report`: runs as one self-contained HTML page, as a picture or as a table of numbers. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from weft.checkpoint.disk import replace_file
from weft.commands.console import check_files, print_result, show_help, wants_help
from weft.commands.run_list import run_folder_of
from weft.commands.status import run_status
from weft.config.command_options import read_options
from weft.config.schema import ConfigSection
from weft.errors import EXIT_OK, Fault, UserError
from weft.start.report_at_end import FILE
from weft.view.quantity import memory

if TYPE_CHECKING:
    from weft.report.recorded_values import RunRecord

NAME = "weft report"
USAGE = "RUN [RUN ...] [--out FILE.html] [--svg FILE.svg] [--png FILE.png] [--csv FILE.csv]"
LINE = "show runs on one page: curves, memory, proof, events, config"
MAX_RUNS = 8


class ReportOptions(ConfigSection):
    """Where a report is written."""

    out: str | None = Field(
        None,
        title="the name of an HTML file",
        examples=["x.html"],
        pattern=r"\.html$",
        description=f"the page; None: {FILE} in the folder of the run, of several in this folder",
    )
    svg: str | None = Field(
        None,
        title="the name of an SVG file",
        examples=["x.svg"],
        pattern=r"\.svg$",
        description="a file for all charts as one picture",
    )
    png: str | None = Field(
        None,
        title="the name of a PNG file",
        examples=["x.png"],
        pattern=r"\.png$",
        description="the same picture as PNG; needs weft-train[png]",
    )
    csv: str | None = Field(
        None,
        title="the name of a CSV file",
        examples=["x.csv"],
        pattern=r"\.csv$",
        description="a file for the numbers of every step of each run, a row a step",
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
    page = options.out or str(folders[0] / FILE if len(folders) == 1 else FILE)
    check_files(options.model_copy(update={"out": page}), "out", "svg", "png", "csv")
    if options.png:
        _check_png()
    from weft.report.charts import charts  # late: they import numpy
    from weft.report.page import report_page
    from weft.report.recorded_values import RunRecord
    from weft.report.svg_charts import picture

    now_s = time.monotonic()
    runs = [
        RunRecord.read(folder, state=run_status(folder, now_s=now_s).state) for folder in folders
    ]
    _write("out", page, report_page(runs))
    if options.svg or options.png:
        marks = runs[0].marks if len(runs) == 1 else ()
        svg = picture(charts(runs), names=[run.name for run in runs], marks=marks)
        if options.svg:
            _write("svg", options.svg, svg)
        if options.png:
            _write("png", options.png, _rasterized(svg))
    if options.csv:
        _write("csv", options.csv, _table(runs))
    return EXIT_OK


def _check_png() -> None:
    """What a PNG needs is here.

    Raises:
        UserError: a package or a font is missing; nothing is written.
    """
    from weft.report.png_picture import png_faults  # late: with the rest of the report

    faults = list(png_faults())
    if faults:
        raise UserError(*faults)


def _rasterized(svg: str) -> bytes:
    from weft.report.png_picture import png_of

    return png_of(svg)


def _write(key: str, file: str, content: str | bytes) -> None:
    """Write a file whole, so that a reader never sees half of it."""
    try:
        replace_file(Path(file), content)
    except OSError as error:
        reason = error.strerror or str(error)
        fix = f"--{key} with a file in another folder"
        raise UserError(Fault(key, f"cannot be written: {reason}", got=file, fix=fix)) from None
    print_result(f"{file}: {memory(Path(file).stat().st_size)}")


def _table(runs: Sequence[RunRecord]) -> str:
    """The steps of all runs as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(_rows(runs))
    return text.getvalue()


def _rows(runs: Sequence[RunRecord]) -> Iterator[tuple[str | int, ...]]:
    yield "run", "step", *runs[0].columns
    for run in runs:
        for step, *values in zip(run.steps.tolist(), *run.columns.values(), strict=True):
            yield run.name, step, *map(_cell, values)


def _cell(value: float) -> str:
    """A number that reads back as itself; empty where a step has none."""
    return "" if math.isnan(value) else repr(float(value))
