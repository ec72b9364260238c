"""`weft simulate`: the step of a run as a timeline, its distribution under jitter, and goodput with failures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import Field

from weft.commands.auto_mesh import choose_mesh
from weft.commands.console import SplitWords, load_checked_run, print_result, split_words
from weft.commands.schedule import MAX_DRAWN_ACTIONS, screen_columns, show, write_picture
from weft.config import flags
from weft.config.run import Run, hardware_of, plan_of
from weft.config.schema import ConfigSection, SiteConfig
from weft.core.axes import local_update_axis
from weft.core.mesh import Mesh
from weft.errors import EXIT_OK, ConfigError, Fault
from weft.layout.plan import Plan
from weft.schedule.actions import Act
from weft.schedule.simulate import UNIT_COSTS, simulate
from weft.schedule.timeline import Timeline
from weft.view.html import html
from weft.view.perfetto import perfetto
from weft.view.svg import svg
from weft.view.text import wrapped

JSON_FLAG = "--json"
USAGE = f"[CONFIG.toml | MODEL.py] [--hardware h100] [--jitter 5%] [{JSON_FLAG}] [--key value ...]"
LINE = "predict the step of a run: timeline, jitter, failures"
MAX_SVG_SPANS = 20_000
DEFAULT_RESTART_S = 600.0
FILES = ("svg", "html", "perfetto")
"""Options that name a file to write."""
NEED_HARDWARE = ("jitter", "slow", "mtbf_hours")
"""Options that are about seconds on a device."""
NEED_FAILURES = ("checkpoint_s", "storage_gb_s", "restart_s")
"""Options that are about failures."""


class SimulateOptions(ConfigSection):
    """What `weft simulate` adds to a run and writes, besides the keys of the run."""

    jitter: str | None = Field(
        None,
        title="a share",
        examples=["5%"],
        description="standard deviation of an action's time: 5% or 0.05",
    )
    draws: int = Field(
        200,
        ge=1,
        le=10_000,
        description="steps that are drawn with jitter",
    )
    slow: tuple[str, ...] = Field(
        (),
        examples=["3=1.3"],
        description="slow ranks: 3=1.3 takes 1.3 times as long",
    )
    mtbf_hours: float | None = Field(
        None,
        gt=0,
        description="mean time between failures of one device, hours",
    )
    checkpoint_s: float | None = Field(
        None,
        ge=0,
        description="seconds for which a checkpoint stops training",
    )
    storage_gb_s: float | None = Field(
        None,
        gt=0,
        description="or bandwidth of the storage for all ranks, 10^9 bytes/s",
    )
    restart_s: float | None = Field(
        None,
        ge=0,
        description="seconds from a failure to the first step; None: 600",
    )
    svg: str | None = Field(
        None,
        title="a file name",
        examples=["x.svg"],
        description="write this SVG picture",
    )
    html: str | None = Field(
        None,
        title="a file name",
        examples=["x.html"],
        description="write this page with zoom and tooltips",
    )
    perfetto: str | None = Field(
        None,
        title="a file name",
        examples=["x.json"],
        description="write this trace for ui.perfetto.dev",
    )


def simulate_run(words: Sequence[str]) -> int:
    """Predict the step of a config and draw it."""
    wants_json = JSON_FLAG in words
    own_words, config_words = divided(words)
    options = flags.read_config(own_words, SimulateOptions)
    run = load_checked_run(config_words, choose_mesh=choose_mesh)
    faults = (*file_faults(options, wants_json=wants_json), *option_faults(options, run))
    if faults:
        raise ConfigError(*faults)
    if run.hardware is None:
        return _simulate_in_units(plan_of(run), options, wants_json=wants_json)
    return _simulate_on_device(run, options, wants_json=wants_json)


def divided(words: Sequence[str]) -> SplitWords:
    """The words of `SimulateOptions`, and those of the config, without --json."""
    others = [word for word in words if word != JSON_FLAG]
    return split_words(others, SimulateOptions)


def file_faults(options: SimulateOptions, *, wants_json: bool) -> Iterator[Fault]:
    """Files that cannot be written, before anything is computed."""
    for name in FILES:
        path = getattr(options, name)
        if path is None:
            continue
        if wants_json:
            fix = f"leave out {JSON_FLAG}, or --{name}"
            yield Fault(
                name,
                f"writes a file, and {JSON_FLAG} prints",
                got=repr(path),
                fix=fix,
            )
        elif Path(path).is_dir() or not Path(path).parent.is_dir():
            fix = f"mkdir -p {Path(path).parent}, or another --{name}"
            yield Fault(
                name,
                "cannot write the file",
                repr(path),
                "a file in a folder",
                fix,
            )


def option_faults(options: SimulateOptions, run: Run) -> Iterator[Fault]:
    """What is wrong with the options for this run."""
    given = {name for name in SimulateOptions.model_fields if getattr(options, name)}
    if run.hardware is None:
        for name in NEED_HARDWARE:
            if name in given:
                what = "is about seconds, and no device is named"
                yield Fault(
                    name,
                    what,
                    need="hardware",
                    fix="--hardware h100",
                )
    if run.hardware is not None:
        yield from _link_faults(run.device_mesh, run.site)
    if options.mtbf_hours is None:
        for name in NEED_FAILURES:
            if getattr(options, name) is not None:
                what = "is about failures, and no mean time between them is given"
                yield Fault(
                    name,
                    what,
                    need="mtbf_hours",
                    fix="--mtbf_hours 50000",
                )
    elif options.checkpoint_s is None and options.storage_gb_s is None:
        what = "needs the cost of a checkpoint"
        fix = "--checkpoint_s 30, or --storage_gb_s 100"
        yield Fault(
            "mtbf_hours",
            what,
            need="checkpoint_s or storage_gb_s",
            fix=fix,
        )
    if options.jitter is not None and read_share(options.jitter) is None:
        need = "a share from 0% to 100%"
        yield Fault(
            "jitter",
            "out of range",
            repr(options.jitter),
            need,
            "--jitter 5%",
        )
    yield from _slow_faults(options.slow, run.device_mesh.size)


def _link_faults(mesh: Mesh, site: SiteConfig) -> Iterator[Fault]:
    """A link between sites whose speed is not known: its seconds are a part of the step."""
    axis = local_update_axis(mesh)
    if axis is None or mesh.degree(axis) == 1 or site.gbit_s:
        return
    yield Fault(
        "site.gbit_s",
        "is not known, and the step waits for the link between sites",
        got=str(site.gbit_s),
        need="its speed in Gbit/s",
        fix="--site.gbit_s 1",
    )


def _slow_faults(words: Sequence[str], num_ranks: int) -> Iterator[Fault]:
    for word in words:
        slow = read_slow(word)
        if slow is None:
            need = "RANK=FACTOR, a factor above 0"
            yield Fault(
                "slow",
                "cannot be read",
                repr(word),
                need,
                "--slow 0=1.3",
            )
        elif slow[0] >= num_ranks:
            need = f"a rank from 0 to {num_ranks - 1}"
            yield Fault(
                "slow",
                "there is no such rank",
                repr(word),
                need,
                f"--slow 0={slow[1]:g}",
            )


def read_share(text: str) -> float | None:
    """`5%` or `0.05` as a number from 0 to 1; None for anything else."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(%?)", text.strip())
    if found is None:
        return None
    share = float(found[1]) / (100 if found[2] else 1)
    return share if share <= 1 else None


def read_slow(text: str) -> tuple[int, float] | None:
    """`3=1.3` as a rank and its factor; None for anything else."""
    found = re.fullmatch(r"(\d{1,9})=(\d{1,6}(?:\.\d{0,9})?|\.\d{1,9})", text.strip())
    if found is None or float(found[2]) <= 0:
        return None
    return int(found[1]), float(found[2])


def _simulate_in_units(plan: Plan, options: SimulateOptions, *, wants_json: bool) -> int:
    """Draw the schedule with costs of stages by their FLOPs; communication takes no time."""
    timeline = simulate(plan.table, lambda act: action_units(plan, act))
    if wants_json:
        print_result(json.dumps({"timeline": json.loads(timeline.to_json())}, indent=1))
    else:
        assumptions = (
            f"{plan.schedule_name}; 1 unit: the mean forward of a stage, by FLOPs; a backward takes two;"
            " communication takes no time (with --hardware: seconds on a device)"
        )
        print_result("\n".join(wrapped(assumptions, screen_columns())))
        _show(timeline, options)
    _write_files(timeline, options, title=f"{plan.schedule_name} on {plan.mesh}")
    return EXIT_OK


def _simulate_on_device(run: Run, options: SimulateOptions, *, wants_json: bool) -> int:
    """Predict the step of a run on a device, and draw it."""
    from weft.planner.measure.measured_run import MeasuredRun  # late: they import torch
    from weft.planner.simulate.speeds import Speeds
    from weft.planner.simulation import (
        Failures,
        Jitter,
        simulate_on,
        simulation_json,
        simulation_lines,
    )

    hardware = hardware_of(run)
    assert hardware is not None, "the caller has looked"
    jitter = failures = None
    if options.jitter is not None:
        spread = read_share(options.jitter)
        assert spread is not None, "the option has been checked"
        jitter = Jitter(spread, options.draws)
    if options.mtbf_hours is not None:
        restart_s = DEFAULT_RESTART_S if options.restart_s is None else options.restart_s
        failures = Failures(
            mtbf_hours=options.mtbf_hours,
            restart_s=restart_s,
            checkpoint_s=options.checkpoint_s,
            storage_gb_s=options.storage_gb_s,
        )
    slow = dict(filter(None, map(read_slow, options.slow)))
    simulation = simulate_on(
        MeasuredRun.of(run),
        Speeds(hardware),
        num_steps=run.steps,
        save_every=run.save.every,
        site=run.site,
        jitter=jitter,
        slow=slow,
        failures=failures,
    )
    if wants_json:
        print_result(json.dumps(simulation_json(simulation), indent=1))
    else:
        print_result("\n".join(simulation_lines(simulation)))
        _show(simulation.shown.timeline, options)
    if any(getattr(options, name) for name in FILES):
        title = f"a step of {run.model.label} on {run.device_mesh}, {hardware.label} (predicted)"
        _write_files(simulation.shown.whole_timeline, options, title=title)
    return EXIT_OK


def _show(timeline: Timeline, options: SimulateOptions) -> None:
    """Print the picture, unless files are written or it would be too large."""
    if any(getattr(options, name) for name in FILES):
        return
    if len(timeline.spans) > MAX_DRAWN_ACTIONS:
        print_result(f"no picture of {len(timeline.spans):,} actions: --html or --perfetto")
        return
    show(timeline, columns=screen_columns())


def _write_files(timeline: Timeline, options: SimulateOptions, *, title: str) -> None:
    if options.svg is not None:
        if len(timeline.spans) > MAX_SVG_SPANS:
            got = f"{len(timeline.spans):,} actions and operations"
            need = f"at most {MAX_SVG_SPANS:,}"
            raise ConfigError(
                Fault(
                    "svg",
                    "too large for an SVG",
                    got,
                    need,
                    "--html x.html",
                )
            )
        write_picture(
            "svg",
            options.svg,
            svg(
                timeline,
                title=title,
                lanes=True,
            ),
        )
    if options.html is not None:
        write_picture("html", options.html, html(timeline, title=title))
    if options.perfetto is not None:
        write_picture("perfetto", options.perfetto, perfetto(timeline, title=title))


def action_units(plan: Plan, act: Act) -> float:
    """Units of one action: 1 is the mean forward of a stage."""
    mean_flops = sum(stage.flops for stage in plan.stages) / len(plan.stages)
    return UNIT_COSTS[act.kind] * plan.stages[act.stage].flops / mean_flops
