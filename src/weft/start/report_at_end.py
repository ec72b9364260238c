"""The page of a run, written into its folder when the run ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.checkpoint.disk import replace_file
from weft.errors import type_and_message

FILE = "report.html"
EVENTS = "events.jsonl"
MODE_VARIABLE = "WEFT_REPORT"
"""Environment variable: `never` writes no pages, whatever the runs say."""


@contextmanager
def report_at_end(out: Path | None) -> Iterator[None]:
    """Write the page when the run has ended, also by an error; a stop by Ctrl-C does not wait for it.

    Args:
        out: the run folder; None: no page is written.
    """
    try:
        yield
    except Exception:
        _write(out)
        raise
    _write(out)


def _write(out: Path | None) -> None:
    if out is None or os.environ.get(MODE_VARIABLE) == "never" or not (out / EVENTS).exists():
        return  # none is wanted, or the run has not begun
    try:
        from weft.report.page import report_page  # late: they import numpy and jinja2
        from weft.report.recorded_values import RunRecord

        replace_file(out / FILE, report_page([RunRecord.read(out)]))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a page, the run is what it is
        sys.stderr.write(f"warning: {out / FILE} is not written: {type_and_message(error)}\n")
