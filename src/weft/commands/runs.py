"""`weft runs`: a table of the runs below a folder. Imports no torch."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from weft.commands.console import (
    check_files,
    print_json,
    print_result,
    print_table,
    show_help,
    wants_help,
)
from weft.commands.run_list import ListedRun, find_runs
from weft.commands.status import State
from weft.config.command_options import JsonOptions, read_options
from weft.errors import EXIT_OK, Fault, UserError, counted, printable
from weft.view.quantity import clock, memory

USAGE = "[FOLDER] [--sort loss] [--state running ...] [--json]"
LINE = "list runs: state, step, loss, speed, layout, age, size"
DEFAULT_FOLDER = "runs"
Column = Literal["name", "state", "step", "loss", "speed", "layout", "age", "size"]

KEYS: dict[Column, Callable[[ListedRun], Any]] = {
    "name": lambda run: run.name,
    "state": lambda run: run.status.state,
    "step": lambda run: -run.status.step,
    "loss": lambda run: _last_if_none(run.status.loss),
    "speed": lambda run: -(run.status.tokens_per_s or 0.0),
    "layout": lambda run: run.layout,
    "age": lambda run: run.age_s,
    "size": lambda run: -run.size_bytes,
}
"""By which a column is sorted: names and layouts by letters, losses and ages from the least, other
numbers from the largest.
"""


class RunsOptions(JsonOptions):
    """Which runs are listed, and in which order."""

    sort: Column = Field(
        "age", description="column to sort by: the newest, the best, the largest first"
    )
    reverse: bool = Field(False, description="the other way round")
    state: tuple[State, ...] = Field((), description="only runs in these states; none: all")
    match: str = Field(
        "", description='only runs whose name or layout matches, as "llama*" or "*tp2*"'
    )


def runs(words: Sequence[str]) -> int:
    """Print the table of the runs below a folder.

    Raises:
        UserError: there is no such folder, or no run in it.
    """
    if wants_help(words):
        return show_help(RunsOptions(), f"weft runs {USAGE}", LINE)
    options, places = read_options(words, RunsOptions)
    check_files(options, "json")
    if len(places) > 1:
        got = " ".join(places)
        raise UserError(Fault("weft runs", "takes one folder", got=got, fix="weft runs runs"))
    root = Path(places[0] if places else DEFAULT_FOLDER)
    if not root.is_dir():
        fix = "weft runs FOLDER, or start one: weft train --steps 20"
        raise UserError(Fault("weft runs", "there is no such folder", got=repr(str(root)), fix=fix))
    found = list(find_runs(root))
    shown = sorted(filter(_filter(options), found), key=KEYS[options.sort], reverse=options.reverse)
    if options.json is not None:
        return print_json(options.json, [run.to_json() for run in shown])
    if not found:
        return print_result(f"no runs in {root}")
    print_table(_table(shown))
    if len(shown) < len(found):
        print_result(f"{len(shown)} of {counted(len(found), 'run')} in {root}")
    return EXIT_OK


def _filter(options: RunsOptions) -> Callable[[ListedRun], bool]:
    def is_shown(run: ListedRun) -> bool:
        is_in_state = not options.state or run.status.state in options.state
        names = (run.name, run.layout)
        is_named = any(fnmatch.fnmatch(name, options.match) for name in names)
        return is_in_state and (not options.match or is_named)

    return is_shown


def _last_if_none(loss: float | None) -> float:
    return math.inf if loss is None or math.isnan(loss) else loss


def _table(found: Sequence[ListedRun]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for name in ("step", "loss", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    for name in ("age", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        table.add_row(*map(printable, run_cells(run)))
    return table


def run_cells(run: ListedRun) -> Iterator[str]:
    """The texts of a row, in the order of the columns."""
    status = run.status
    yield run.name
    yield status.state
    yield f"{status.step}/{status.steps}" if status.steps else str(status.step)
    yield "-" if status.loss is None else f"{status.loss:.4f}"
    yield "-" if status.tokens_per_s is None else f"{status.tokens_per_s:,.0f}"
    yield run.layout or "one rank"
    yield clock(run.age_s)
    yield memory(run.size_bytes) if run.size_bytes else "0 B"
