"""`weft simulate`: the step of a run as a timeline, its distribution under jitter, and goodput with failures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.commands.console import (
    check_files,
    help_of_run,
    print_json,
    print_result,
    show_help,
    wants_help,
)
from weft.config.command_options import STANDARD_OUTPUT, take_options
from weft.config.run import hardware_of, plan_of
from weft.errors import EXIT_OK, ConfigError, Fault
from weft.layout.plan import Plan
from weft.models import model_label
from weft.schedule.simulate import simulate
from weft.schedule.timeline import Timeline
from weft.start.auto_mesh import choose_mesh
from weft.start.auto_recompute import choose_recompute
from weft.start.checked_run import load_checked_run
from weft.view.html import html
from weft.view.perfetto import perfetto
from weft.view.svg import svg
from weft.view.text import wrapped
from weft_plan.commands.schedule import MAX_DRAWN_ACTIONS, screen_columns, show, write_picture
from weft_plan.commands.simulate_options import (
    FILES,
    SimulateOptions,
    file_faults,
    option_faults,
    read_share,
    read_slow,
)
from weft_plan.entries import SIMULATE

if TYPE_CHECKING:
    from weft_plan.simulation.run_simulation import Failures, Jitter, RunSimulation

MAX_SVG_SPANS = 20_000
DEFAULT_RESTART_S = 600.0


def simulate_run(words: Sequence[str]) -> int:
    """Predict the step of a config and draw it."""
    options, config_words = take_options(words, SimulateOptions)
    if wants_help(words):
        show_help(SimulateOptions(), f"weft simulate {SIMULATE.usage}", SIMULATE.line)
        return help_of_run("simulate", SIMULATE, config_words)
    check_files(options, "json")
    run = load_checked_run(config_words, choose_mesh=choose_mesh, choose_recompute=choose_recompute)
    hardware = hardware_of(run)
    faults = (
        *file_faults(options),
        *option_faults(options, run.device_mesh, run.site, has_hardware=hardware is not None),
    )
    if faults:
        raise ConfigError(*faults)
    if hardware is None:
        return _simulate_in_units(plan_of(run), options)
    from weft.planner.measure.measured_run import MeasuredRun  # late: they import torch
    from weft.planner.simulate.speeds import Speeds
    from weft_plan.simulation.run_simulation import simulate_on

    simulation = simulate_on(
        MeasuredRun.of(run),
        Speeds(hardware),
        num_steps=run.steps,
        save_every=run.save.every,
        site=run.site,
        jitter=_jitter(options),
        slow=dict(filter(None, map(read_slow, options.slow))),
        failures=_failures(options),
    )
    title = f"a step of {model_label(run.model)} on {run.device_mesh}, {hardware.label} (predicted)"
    return _show_simulation(simulation, options, title=title)


def _simulate_in_units(plan: Plan, options: SimulateOptions) -> int:
    """Draw the schedule with costs of stages by their FLOPs; communication takes no time."""
    timeline = simulate(plan.table, plan.action_units)
    if options.json is not None:
        print_json(options.json, {"timeline": json.loads(timeline.to_json())})
    else:
        assumptions = (
            f"{plan.schedule_name}; 1 unit: the mean forward of a stage, by FLOPs; a backward takes two;"
            " communication takes no time (with --hardware: seconds on a device)"
        )
        print_result("\n".join(wrapped(assumptions, screen_columns())))
        _show(timeline, options)
    _write_files(timeline, options, title=f"{plan.schedule_name} on {plan.mesh}")
    return EXIT_OK


def _jitter(options: SimulateOptions) -> Jitter | None:
    """The jitter that the options ask for; None: none."""
    if options.jitter is None:
        return None
    from weft_plan.simulation.run_simulation import Jitter  # late: it imports torch

    spread = read_share(options.jitter)
    assert spread is not None, "the option has been checked"
    return Jitter(spread, options.draws)


def _failures(options: SimulateOptions) -> Failures | None:
    """The failures that the options ask for; None: none."""
    if options.mtbf_hours is None:
        return None
    from weft_plan.simulation.run_simulation import Failures  # late: it imports torch

    restart_s = options.restart_s
    if restart_s is None:
        restart_s = DEFAULT_RESTART_S
    return Failures(
        mtbf_hours=options.mtbf_hours,
        restart_s=restart_s,
        checkpoint_s=options.checkpoint_s,
        storage_gb_s=options.storage_gb_s,
    )


def _show_simulation(simulation: RunSimulation, options: SimulateOptions, *, title: str) -> int:
    """Print what is predicted, and draw it.

    Args:
        title: of pictures in files.
    """
    from weft_plan.simulation.run_simulation import (  # late: imports torch
        simulation_json,
        simulation_lines,
    )

    if options.json is not None:
        print_json(options.json, simulation_json(simulation))
    else:
        print_result("\n".join(simulation_lines(simulation)))
        _show(simulation.shown.timeline, options)
    if any(getattr(options, name) for name in FILES):
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
    is_named = options.json != STANDARD_OUTPUT
    if options.svg is not None:
        if len(timeline.spans) > MAX_SVG_SPANS:
            got = f"{len(timeline.spans):,} actions and operations"
            need = f"at most {MAX_SVG_SPANS:,}"
            raise ConfigError(Fault("svg", "too large for an SVG", got, need, "--html x.html"))
        picture = svg(timeline, title=title, lanes=True)
        write_picture("svg", options.svg, picture, is_named=is_named)
    if options.html is not None:
        write_picture("html", options.html, html(timeline, title=title), is_named=is_named)
    if options.perfetto is not None:
        events = perfetto(timeline, title=title)
        write_picture("perfetto", options.perfetto, events, is_named=is_named)
