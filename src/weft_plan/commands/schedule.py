"""`weft schedule`: pictures, comparisons and searches of pipeline schedules as text, SVG, JSON or schedule files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from weft.commands.console import fix_of_path, print_result, show_help, wants_help
from weft.config.command_options import STANDARD_OUTPUT
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.core.dimension import pipeline_axis
from weft.errors import EXIT_OK, ConfigError, Fault, UserError
from weft.schedule.actions import Table
from weft.schedule.catalog import DEFAULT_MICROBATCHES, DEFAULT_RANKS, find, lines_of, make_table
from weft.schedule.costs import ScheduleCosts
from weft.schedule.simulate import peak_live, simulate
from weft.schedule.timeline import Timeline, bubble, makespan
from weft.start.checked_run import load_checked_run
from weft.view.colour import paint
from weft.view.svg import TitledTimeline, stacked_svg, svg
from weft.view.text import draw, wrapped
from weft_plan.commands.schedule_options import (
    DEFAULT_NAME,
    ScheduleOptions,
    ScheduleWords,
    read_words,
)
from weft_plan.commands.schedule_report import (
    FOUND,
    ScheduleBytes,
    comparison_fields,
    comparison_lines,
    file_comment,
    search_fields,
    search_lines,
    timeline_fields,
)
from weft_plan.entries import SCHEDULE
from weft_plan.schedule_search.compare import ScheduleFigures, accepting, compare
from weft_plan.schedule_search.table_search import PLACEMENTS, SearchRequest, search

if TYPE_CHECKING:
    from weft.planner.measure.roles import RoleCosts

MAX_DRAWN_ACTIONS = 50_000
UNCLIPPED = 100_000
"""Columns of a picture before it is clipped to the screen."""
SEARCHED_FILE = "searched.schedule"
"""Where a found table is written by default."""


def schedule(words: Sequence[str]) -> int:
    """Draw a schedule, compare several, or search the shortest table."""
    if wants_help(words):
        return show_help(ScheduleOptions(), f"weft schedule {SCHEDULE.usage}", SCHEDULE.line)
    asked = read_words(words)
    if asked.mode == "compare":
        return _compare(asked)
    if asked.mode == "search":
        return _search(asked.options)
    return _draw(asked.names[0], asked.options)


def _draw(name: str, options: ScheduleOptions) -> int:
    """Draw one schedule; without costs a forward of a stage takes 1 unit, a backward 2."""
    table = make_table(
        name, ranks=options.ranks, microbatches=options.microbatches, chunks=options.chunks
    )
    check_picture(table)
    found = find(name)
    if options.costs or options.message != "0":
        timeline = ScheduleFigures(name=name, table=table, costs=_costs(options)).timeline
    else:
        timeline = simulate(table)
    summary = found.doc.strip().splitlines()[0]
    if options.svg is not None:
        write_picture("svg", options.svg, svg(timeline, title=summary))
    if options.json is not None:
        write_picture("json", options.json, schedule_json(table, timeline))
    if options.text is not None:
        write_picture("text", options.text, table.text)
    if options.svg is None and options.json is None and options.text is None:
        columns = options.width or screen_columns()
        print_result("\n".join(wrapped(summary, columns)))
        show(timeline, columns=columns)
    return EXIT_OK


def _compare(asked: ScheduleWords) -> int:
    """Compare schedules on one scale: the same work on every device."""
    options = asked.options
    if options.config is None:
        run = None
    else:
        run = _pipeline_run(options.config)
    if run is None:
        ranks = options.ranks
    else:
        ranks = run.pipeline_size
    if run is None:
        microbatches = options.microbatches
    else:
        microbatches = run.num_micro
    sizes_of_all = {
        "ranks": ranks or DEFAULT_RANKS,
        "microbatches": microbatches or DEFAULT_MICROBATCHES,
    }
    names = asked.names or tuple(accepting(**sizes_of_all))
    compared = compare(
        names or (DEFAULT_NAME,),
        _costs(options),
        ranks=ranks,
        microbatches=microbatches,
        chunks=options.chunks,
    )
    for figures in compared:
        check_picture(figures.table)
    sizes: tuple[ScheduleBytes, ...] = ()
    if run is not None:
        sizes = _bytes_of_schedules(run, compared)
    if options.svg is not None:
        titled = [TitledTimeline(_title(figures), figures.timeline) for figures in compared]
        write_picture("svg", options.svg, stacked_svg(titled))
    if options.json is not None:
        write_picture("json", options.json, _json_text(comparison_fields(compared, sizes)))
    if options.svg is None and options.json is None:
        print_result("\n".join(comparison_lines(compared, sizes)))
    return EXIT_OK


def _search(options: ScheduleOptions) -> int:
    """Search the shortest table under a memory limit, and write it to a schedule file."""
    request = _search_request(options)
    path = options.text or SEARCHED_FILE
    if options.text is None:
        _check_replaceable(Path(path))
    result = search(request)
    print_result("\n".join(search_lines(result)))
    write_picture("text", path, file_comment(result) + result.best.table.text)
    if options.svg is not None:
        picture = svg(result.best.timeline, title=_title(result.best))
        write_picture("svg", options.svg, picture)
    if options.json is not None:
        write_picture("json", options.json, _json_text(search_fields(result)))
    return EXIT_OK


def _search_request(options: ScheduleOptions) -> SearchRequest:
    """What the options ask for, checked."""
    ranks = options.ranks or DEFAULT_RANKS
    asked_limits = _finite(options.memory_limit or (ranks,))
    limits = tuple(Fraction(str(limit)) for limit in asked_limits)
    if len(limits) == 1:
        limits *= ranks
    if options.chunks is not None and options.chunks not in PLACEMENTS:
        placements = [f"{chunks}: {text}" for chunks, text in PLACEMENTS.items()]
        need = ", or ".join(placements)
        raise ConfigError(
            Fault("chunks", "is not searched", got=str(options.chunks), need=need, fix="--chunks 1")
        )
    request = SearchRequest(
        ranks=ranks,
        microbatches=options.microbatches or DEFAULT_MICROBATCHES,
        limits=limits,
        costs=_costs(options),
        chunks=tuple(PLACEMENTS) if options.chunks is None else (options.chunks,),
        seconds=options.seconds,
    )
    request.check()
    return request


def _finite(limits: Sequence[float]) -> Sequence[float]:
    for limit in limits:
        if not abs(limit) < MAX_LIMIT:
            need = f"at least 1 and below {MAX_LIMIT:g}"
            raise ConfigError(
                Fault(
                    "memory_limit",
                    "out of range",
                    got=f"{limit:g}",
                    need=need,
                    fix="--memory_limit with such numbers",
                )
            )
    return limits


MAX_LIMIT = 1e9
"""Micro-batches of a memory limit."""


def _check_replaceable(path: Path) -> None:
    """Check that no file of the user's is at the default path of a found table.

    Raises:
        ConfigError: there is one.
    """
    if not path.exists():
        return
    try:
        with path.open(encoding="utf-8") as file:
            is_found_table = file.read(len(FOUND)) == FOUND
    except (OSError, UnicodeDecodeError):
        is_found_table = False
    if not is_found_table:
        what = f"{path} exists and is no found table"
        raise ConfigError(Fault("text", what, fix="choose another file: --text best.schedule"))


def _pipeline_run(path: str) -> Run:
    """The checked run of a config with a pipeline.

    Raises:
        UserError: with every fault.
    """
    run = load_checked_run([path])
    if run.pipeline_size == 1:
        need = f"an axis {pipeline_axis()} of at least 2"
        raise ConfigError(
            Fault(
                "config",
                "its mesh has no pipeline",
                got=run.mesh,
                need=need,
                fix=f"add the axis to its mesh, for example {pipeline_axis()}2",
            )
        )
    return run


def _bytes_of_schedules(run: Run, compared: Sequence[ScheduleFigures]) -> tuple[ScheduleBytes, ...]:
    """Bytes of the run with each schedule, from its own code on the meta device.

    Raises:
        UserError: the run does not accept one of the schedules.
    """
    from weft.planner.measure.measured_run import MeasuredRun
    from weft.planner.measure.roles import measure  # late: they import torch

    runs: list[Run] = []
    for figures in compared:
        values = {
            "pipeline.schedule": figures.name,
            "pipeline.chunks": figures.chunks,
            "pipeline.table": lines_of(figures.name),
            "pipeline.split": (),
        }
        changed = run.with_values(values)
        faults = run_checks(changed, config_checks)
        if faults:
            raise UserError(*faults)
        runs.append(changed)
    return tuple(_bytes_of_roles(measure(MeasuredRun.of(changed))) for changed in runs)


def _bytes_of_roles(roles: Sequence[RoleCosts]) -> ScheduleBytes:
    """Bytes of the fullest rank, and of all messages of one copy of the pipeline."""
    fullest = max(roles, key=lambda role: role.memory.peak)
    sent = 0
    for role in roles:
        messages = role.traffic.get((pipeline_axis(), "send"))
        sent += messages.sent_bytes if messages is not None else 0
    return ScheduleBytes(
        in_flight=fullest.memory.in_flight + fullest.memory.workspace,
        peak=fullest.memory.peak,
        messages=sent,
    )


def _costs(options: ScheduleOptions) -> ScheduleCosts:
    return ScheduleCosts.parse(options.costs, message=options.message)


def _title(figures: ScheduleFigures) -> str:
    if figures.chunks > 1:
        chunks = f", {figures.chunks} chunks a rank"
    else:
        chunks = ""
    return f"{figures.label}{chunks}"


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
            Fault(
                "schedule",
                "too large for a picture",
                got=f"{num_actions} actions",
                need=need,
                fix=fix,
            )
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
    """The table, its timeline, its bubble and the activations that each rank holds at once."""
    fields = {
        "table": json.loads(table.to_json()),
        "timeline": timeline_fields(timeline),
        "makespan": float(makespan(timeline)),
        "bubble": float(bubble(timeline)),
        "peak_activations": peak_live(table),
    }
    return _json_text(fields)


def _json_text(fields: object) -> str:
    return json.dumps(fields, indent=1) + "\n"


def write_picture(key: str, path: str, text: str, *, is_named: bool = True) -> None:
    """Write a picture, or another text, that the option `key` asks for.

    Args:
        is_named: whether the file is named on standard output; not where that is to be JSON.

    Raises:
        ConfigError: it cannot be written.
    """
    if path == STANDARD_OUTPUT:
        print_result(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        fix = fix_of_path(path, key)
        raise ConfigError(
            Fault(key, f"cannot write the file: {error.strerror}", got=repr(path), fix=fix)
        ) from None
    if is_named:
        print_result(f"wrote {path}")
