"""`weft schedule`: pictures of pipeline schedules as text, SVG or JSON."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console

from weft.commands.console import print_result, show_help
from weft.config import flags
from weft.config.schema import ConfigSection
from weft.errors import EXIT_OK, ConfigError, Fault
from weft.schedule.actions import Table
from weft.schedule.catalog import SCHEDULES, find, make_table
from weft.schedule.simulate import peak_live, simulate
from weft.schedule.timeline import Timeline, bubble, makespan
from weft.view.colour import paint
from weft.view.svg import svg
from weft.view.text import draw, wrapped

USAGE = "[NAME] [--ranks 4 ...]"
LINE = "draw a pipeline schedule"
MAX_DRAWN_ACTIONS = 50_000
UNCLIPPED = 100_000
"""Columns of a picture before it is clipped to the screen."""


with warnings.catch_warnings():
    warnings.filterwarnings(
        "ignore", "Field name .json."
    )  # pydantic's deprecated method; the option is `--json`

    class ScheduleOptions(ConfigSection):
        """What `weft schedule` draws, and as what."""

        schedule: str = Field("1f1b", description=f"{', '.join(SCHEDULES)}, or a file with a table")
        ranks: int = Field(4, ge=1, description="pipeline ranks")
        chunks: int | None = Field(
            None, ge=1, description="model chunks a rank; None: the schedule's default"
        )
        microbatches: int = Field(8, ge=1, description="micro-batches a step")
        width: int | None = Field(
            None, ge=40, description="columns of the text picture; None: the screen's"
        )
        svg: str | None = Field(
            None,
            title="a file name",
            examples=["x.svg"],
            description="write the picture to this SVG file",
        )
        json: str | None = Field(  # type: ignore[assignment]
            None,
            title="a file name",
            examples=["x.json"],
            description="write table and timeline to this JSON file",
        )


def schedule(words: Sequence[str]) -> int:
    """Draw a schedule at unit costs: a forward takes 1 unit, a backward 2."""
    names = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    if len(names) > 1:
        raise ConfigError(
            Fault("schedule", "takes one name", " ".join(names), fix=f"weft schedule {names[0]}")
        )
    named = ["--schedule", *words] if names else words
    options = flags.read_config(named, ScheduleOptions)
    table = make_table(
        options.schedule,
        ranks=options.ranks,
        microbatches=options.microbatches,
        chunks=options.chunks,
    )
    check_picture(table)
    timeline = simulate(table)
    summary = find(options.schedule).doc.strip().splitlines()[0]
    if options.svg is not None:
        write_picture("svg", options.svg, svg(timeline, title=summary))
    if options.json is not None:
        write_picture("json", options.json, schedule_json(table, timeline))
    if options.svg is None and options.json is None:
        columns = options.width or screen_columns()
        print_result("\n".join(wrapped(summary, columns)))
        show(timeline, columns=columns)
    return EXIT_OK


def help_of_schedule() -> int:
    """Print the options of `weft schedule`."""
    return show_help(ScheduleOptions(), f"weft schedule {USAGE}", LINE)


def check_picture(table: Table) -> None:
    """Check that a table is small enough to be simulated and drawn at once.

    Raises:
        ConfigError: it is not.
    """
    num_actions = sum(map(len, table.rows))
    if num_actions > MAX_DRAWN_ACTIONS:
        need = f"at most {MAX_DRAWN_ACTIONS}"
        fix = "fewer ranks, chunks or micro-batches"
        raise ConfigError(
            Fault("schedule", "too large for a picture", f"{num_actions} actions", need, fix)
        )


def screen_columns() -> int:
    """Columns of the terminal, of the environment variable COLUMNS, or 80."""
    return shutil.get_terminal_size().columns


def show(timeline: Timeline, *, columns: int) -> None:
    """Print the text picture, clipped to `columns`; coloured on a terminal."""
    console = Console()
    if console.is_terminal:
        painted = paint(timeline, width=UNCLIPPED, columns=columns)
        console.print(painted, overflow="ignore", crop=False, end="")
    else:
        print_result(draw(timeline, width=UNCLIPPED, clip=columns))


def schedule_json(table: Table, timeline: Timeline) -> str:
    """The table, its timeline at unit costs, its bubble and the activations that each rank holds at
    once.
    """
    fields = {
        "table": json.loads(table.to_json()),
        "timeline": json.loads(timeline.to_json()),
        "makespan": float(makespan(timeline)),
        "bubble": float(bubble(timeline)),
        "peak_activations": peak_live(table),
    }
    return json.dumps(fields, indent=1) + "\n"


def write_picture(key: str, path: str, text: str) -> None:
    """Write a picture that the option `key` asks for, and name the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        folder = Path(path).parent
        fix = (
            f"choose another --{key}"
            if folder.is_dir()
            else f"create the folder: mkdir -p {folder}"
        )
        raise ConfigError(
            Fault(key, f"cannot write the file: {error.strerror}", got=repr(path), fix=fix)
        ) from None
    print_result(f"wrote {path}")
