"""`weft schedule` and `weft simulate`: pictures of pipeline schedules as text, SVG or JSON."""

from __future__ import annotations

import itertools
import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from rich.console import Console

from weft.commands.console import load_checked_run, print_result, show_help
from weft.config import flags
from weft.config.hardware import Hardware, find_hardware
from weft.config.run import Run, plan_of
from weft.config.schema import ConfigSection
from weft.errors import EXIT_OK, ConfigError, Fault
from weft.layout.plan import Plan
from weft.parallel.cp import AXIS as CP
from weft.parallel.tp import AXIS as TP
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import SCHEDULES, find, make_table
from weft.schedule.simulate import UNIT_COSTS, peak_live, simulate
from weft.schedule.timeline import Timeline, bubble, makespan
from weft.view.colour import paint
from weft.view.svg import svg
from weft.view.text import draw, wrapped

USAGE = "[NAME] [--ranks 4 ...]"
LINE = "draw a pipeline schedule"
SIMULATED_FLOPS = 1e12
"""FLOP/s of a simulated rank."""
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
    _check_picture(table)
    timeline = simulate(table)
    summary = find(options.schedule).doc.strip().splitlines()[0]
    if options.svg is not None:
        _write("svg", options.svg, svg(timeline, title=summary))
    if options.json is not None:
        _write("json", options.json, schedule_json(table, timeline))
    if options.svg is None and options.json is None:
        columns = options.width or screen_columns()
        print_result("\n".join(wrapped(summary, columns)))
        show(timeline, columns=columns)
    return EXIT_OK


def help_of_schedule() -> int:
    """Print the options of `weft schedule`."""
    return show_help(ScheduleOptions(), f"weft schedule {USAGE}", LINE)


def simulate_run(words: Sequence[str]) -> int:
    """Draw the pipeline of a config as the simulator runs it."""
    run = load_checked_run(words)
    plan = plan_of(run)
    _check_picture(plan.table)
    columns = screen_columns()
    if run.hardware is not None:
        return _simulate_on(run, find_hardware(run.hardware), columns)
    speed = f"a rank at {SIMULATED_FLOPS / 1e12:g} TFLOP/s, a backward twice its forward"
    assumptions = f"{plan.schedule}; {speed}; communication takes no time"
    print_result("\n".join(wrapped(assumptions, columns)))
    show(simulate(plan.table, lambda act: action_s(plan, act), unit="s"), columns=columns)
    return EXIT_OK


def _simulate_on(run: Run, hardware: Hardware, columns: int) -> int:
    """Draw the predicted step of a run on a device."""
    from weft.planner.measure import measure  # late: they import torch
    from weft.planner.report import time_lines
    from weft.planner.speeds import Speeds
    from weft.planner.step_time import step_time

    roles = measure(run)
    speeds = Speeds(hardware)
    print_result("\n".join(time_lines(roles, speeds)))
    show(step_time(roles, speeds).timeline, columns=columns)
    return EXIT_OK


def _check_picture(table: Table) -> None:
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


def action_s(plan: Plan, act: Act) -> float:
    """Seconds of one action on one simulated rank."""
    num_shards = plan.mesh.degree((TP, CP))
    stage = plan.stages[act.stage]
    unit_cost = UNIT_COSTS[act.kind]
    flops = unit_cost * stage.flops * plan.micro_size
    return flops / num_shards / SIMULATED_FLOPS


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


def _write(key: str, path: str, text: str) -> None:
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
