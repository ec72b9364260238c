"""`weft trace`: what was measured in the profiled steps of a run, below what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field, ValidationError

from weft.commands.console import check_files, print_json, print_result, show_help, wants_help
from weft.commands.run_list import run_folder_of
from weft.config.command_options import STANDARD_OUTPUT, JsonOptions, read_options
from weft.config.run import hardware_of
from weft.config.run_files import stored_config
from weft.errors import EXIT_OK, ConfigError, Fault, UserError
from weft.layout.plan import Plan
from weft.profiler.measured_steps import MeasuredSteps
from weft.profiler.measured_timeline import measured_timeline
from weft.profiler.profile_folder import CONFIG_FILE, PLAN_FILE, Profile, read_profile
from weft.report.chart_part import chart_part
from weft.report.charts import one_device_charts
from weft.report.recorded_values import RunRecord
from weft.small_files import MIB, UnreadableFile, read_text
from weft.start.checked_run import load_checked_run
from weft.view.html import ScriptedPart, stacked_html
from weft.view.perfetto import stacked_perfetto
from weft.view.svg import TitledTimeline, stacked_svg
from weft.view.text import wrapped
from weft_plan.commands.schedule import screen_columns, write_picture
from weft_plan.entries import TRACE
from weft_plan.tracing.compared_steps import Trace, fits_plan, whole_steps
from weft_plan.tracing.step_prediction import StepPrediction, predict_schedule
from weft_plan.tracing.trace_report import (
    MOST_RANKS,
    rank_table,
    sentences,
    tables,
    title_of,
    trace_json,
)

NAME = "weft trace"
PAGE = "trace.html"
MOST_DRAWN_RANKS = 64
"""Ranks of the page and the SVG, the first ones; the trace for Perfetto has all."""
MOST_SVG_SPANS = 20_000
MOST_PLAN_BYTES = 16 * MIB


class TraceOptions(JsonOptions):
    """Which steps are shown, beside which prediction, and what is written."""

    number: int | None = Field(
        None, ge=1, title="a whole number", description="profile of the run; None: the newest"
    )
    step: int | None = Field(
        None,
        ge=1,
        title="a whole number",
        description="this step alone; None: all that were recorded",
    )
    hardware: str | None = Field(
        None,
        title="the name of a device, or a hardware file",
        examples=["mine.toml"],
        description="device of the prediction; None: that of the run, or its schedule alone",
    )
    html: str | None = Field(
        None,
        title="a file name",
        examples=["x.html"],
        description=f"the page with zoom and tooltips; None: {PAGE} beside the records",
    )
    one_device: int | None = Field(
        None,
        ge=1,
        le=100_000,
        title="a number of steps",
        description="repeat the first steps on one device, to draw both losses; None: those that were "
        "compared before, here or by weft prove RUN",
    )
    svg: str | None = Field(
        None, title="a file name", examples=["x.svg"], description="write this SVG picture"
    )
    perfetto: str | None = Field(
        None,
        title="a file name",
        examples=["x.json"],
        description="write this trace for ui.perfetto.dev",
    )


def trace(words: Sequence[str]) -> int:
    """Say and draw what was measured in the profiled steps of a run.

    Raises:
        UserError: no run is named, it has no such profile, or a file cannot be written.
    """
    if wants_help(words):
        return show_help(TraceOptions(), f"{NAME} {TRACE.usage}", TRACE.line)
    options, places = read_options(words, TraceOptions)
    if len(places) != 1:
        got = " ".join(places) or "nothing"
        raise UserError(Fault(NAME, "takes one run folder", got, fix="see weft runs"))
    folder = run_folder_of(places[0], command=NAME)
    profile = read_profile(folder, options.number)
    page = options.html or str(profile.folder / PAGE)
    check_files(options.model_copy(update={"html": page}), "json", "html", "svg", "perfetto")
    run = _run_with_losses(folder, options)
    found = _trace_of(profile, options, run)
    title = title_of(found)
    if options.json is not None:
        print_json(options.json, trace_json(found))
    else:
        _print(found, title)
    drawn = _drawn(found)
    is_named = options.json != STANDARD_OUTPUT
    if options.svg is not None:
        if sum(len(each.timeline.spans) for each in drawn) > MOST_SVG_SPANS:
            need = f"at most {MOST_SVG_SPANS:,} actions and operations"
            fix = "the page, which draws all of them"
            raise ConfigError(Fault("svg", "too large for an SVG", need=need, fix=fix))
        write_picture("svg", options.svg, stacked_svg(drawn, lanes=True), is_named=is_named)
    if options.perfetto is not None:
        nested = _drawn(found, nested=True)
        events = stacked_perfetto(nested, title=title)
        write_picture("perfetto", options.perfetto, events, is_named=is_named)
    if options.html is not None or options.json is None:
        text = stacked_html(
            drawn,
            title=title,
            sentences=list(sentences(found)),
            tables=tables(found),
            part=_losses_part(run),
        )
        write_picture("html", page, text, is_named=is_named)
    return EXIT_OK


def _run_with_losses(folder: Path, options: TraceOptions) -> RunRecord:
    """What the run has recorded, with its losses beside those of one device.

    Raises:
        UserError: the steps that are asked for cannot be repeated.
    """
    if options.one_device is not None:
        from weft.start.prove_run import ignore_line, prove_folder  # late: it imports torch

        show = ignore_line if options.json == STANDARD_OUTPUT else print_result
        prove_folder(folder, first=options.one_device, show=show)
    return RunRecord.read(folder)


def _trace_of(profile: Profile, options: TraceOptions, run: RunRecord) -> Trace:
    """The steps that are asked for, and their prediction.

    Raises:
        UserError: there are none.
    """
    plan = _plan_of(profile)
    if not fits_plan(profile, plan):
        what = "is not the plan of the ranks whose records are beside it"
        fix = "record steps again with --profile"
        raise UserError(Fault(str(profile.folder / PLAN_FILE), what, fix=fix))
    steps = MeasuredSteps.of(profile)
    whole = whole_steps(steps, plan.table)
    numbers = tuple(each for each in whole if options.step in (None, each))
    if not numbers:
        header = profile.ranks[0].header
        got = "no whole step" if options.step is None else str(options.step)
        need = f"one of {', '.join(map(str, whole))}"
        if not whole:
            need = f"a whole one of steps {header.first} to {header.end - 1}"
        fix = "leave --step out" if whole else "record steps again with --profile"
        raise UserError(Fault("step", "was not recorded on all ranks", got, need, fix))
    prediction = _predict(profile, plan, steps, numbers, options)
    return Trace(profile, plan, steps, numbers, prediction, run.losses)


def _plan_of(profile: Profile) -> Plan:
    """The plan of the start that was profiled.

    Raises:
        UserError: it cannot be read.
    """
    path = profile.folder / PLAN_FILE
    try:
        return Plan.from_json(read_text(path, max_bytes=MOST_PLAN_BYTES, within=path.parent))
    except (UnreadableFile, ValidationError) as error:
        what = "is no plan of a run"
        first = str(error).partition("\n")[0]
        got = error.what if isinstance(error, UnreadableFile) else first
        fix = "record steps again with --profile"
        raise UserError(Fault(str(path), what, got=got, fix=fix)) from None


def _predict(
    profile: Profile,
    plan: Plan,
    steps: MeasuredSteps,
    numbers: tuple[int, ...],
    options: TraceOptions,
) -> StepPrediction:
    """On the device of the options or of the run; without one, of the schedule alone."""
    config = profile.folder / CONFIG_FILE
    flags = [] if options.hardware is None else ["--hardware", options.hardware]
    if not flags and stored_config(profile.folder).get("hardware") is None:
        return predict_schedule(plan, steps, numbers)
    run = load_checked_run([str(config), *flags])
    hardware = hardware_of(run)
    assert hardware is not None, "the words or the config name it"
    from weft.planner.measure.measured_run import MeasuredRun  # late: they import torch
    from weft.planner.simulate.speeds import Speeds
    from weft_plan.tracing.device_prediction import predict_on_device

    return predict_on_device(MeasuredRun.of(run), Speeds(hardware))


def _print(found: Trace, title: str) -> None:
    columns = screen_columns()
    lines = [title]
    for sentence in sentences(found):
        lines.extend(wrapped(sentence, columns))
    for table in tables(found):
        shown = table.lines
        if table.title == rank_table(found).title and found.num_ranks > MOST_RANKS:
            shown = [*shown[: MOST_RANKS + 2], f"  ... {found.num_ranks} ranks, see the page"]
        lines.extend(("", *shown))
    print_result("\n".join(lines))


def _losses_part(run: RunRecord) -> ScriptedPart | None:
    """Both losses and their difference, where they were compared."""
    if not run.losses:
        return None
    charts = [chart for chart in one_device_charts([run]) if chart.series]
    return chart_part([run], charts, title="The loss beside that of one device")


def _drawn(found: Trace, *, nested: bool = False) -> list[TitledTimeline]:
    """The prediction, and below it what was measured."""
    prediction = found.prediction
    mesh = found.plan.mesh
    numbers = found.numbers if nested else (found.drawn,)
    paths = [path for path in found.paths if path.step in numbers]
    timeline = measured_timeline(found.steps, numbers, found.plan.table, paths=paths, nested=nested)
    below = f"measured: step {found.drawn}"
    num_drawn = mesh.size if nested else min(mesh.size, MOST_DRAWN_RANKS)
    if num_drawn < mesh.size:
        below = f"{below}, ranks 0 to {num_drawn - 1} of {mesh.size}"
        timeline = replace(timeline.only(ranks=range(num_drawn)), num_ranks=num_drawn)
    above = f"predicted: {prediction.source}"
    figures = _figures(prediction.bubble, "predicted")
    prefix = "predicted " if nested else ""
    rows = tuple(f"{prefix}pp{row}" for row in range(prediction.timeline.num_ranks))
    ranks = tuple(f"rank {rank}" for rank in range(mesh.size))
    if nested:
        ranks = tuple(f"rank {rank} ({mesh.coord_text(rank)})" for rank in range(mesh.size))
    return [
        TitledTimeline(above, prediction.timeline, figures, rows),
        TitledTimeline(
            below, timeline, _figures(found.steps.bubble(found.drawn), "measured"), ranks
        ),
    ]


def _figures(bubble: float | None, origin: str) -> str:
    return "" if bubble is None else f"{bubble:.1%} bubble ({origin})"
