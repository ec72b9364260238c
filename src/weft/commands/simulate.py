"""`weft simulate`: the pipeline of a run as a timeline, on a device or at a fixed speed."""

from __future__ import annotations

from collections.abc import Sequence

from weft.commands.console import load_checked_run, print_result
from weft.commands.schedule import check_picture, screen_columns, show
from weft.config.hardware import Hardware, find_hardware
from weft.config.run import Run, plan_of
from weft.errors import EXIT_OK
from weft.layout.plan import Plan
from weft.parallel.cp import AXIS as CP
from weft.parallel.tp import AXIS as TP
from weft.schedule.actions import Act
from weft.schedule.simulate import UNIT_COSTS, simulate
from weft.view.text import wrapped

SIMULATED_FLOPS = 1e12
"""FLOP/s of a rank where no device is named."""


def simulate_run(words: Sequence[str]) -> int:
    """Draw the pipeline of a config as the simulator runs it."""
    run = load_checked_run(words)
    plan = plan_of(run)
    check_picture(plan.table)
    columns = screen_columns()
    if run.hardware is not None:
        hardware = find_hardware(run.hardware).for_matmul(run.precision.matmul)
        return _simulate_on(run, hardware, columns)
    speed = f"a rank at {SIMULATED_FLOPS / 1e12:g} TFLOP/s, a backward twice its forward"
    assumptions = f"{plan.schedule_name}; {speed}; communication takes no time"
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
    speeds = Speeds(hardware, hardware.efficiency)
    print_result("\n".join(time_lines(roles, speeds)))
    show(step_time(roles, speeds).timeline, columns=columns)
    return EXIT_OK


def action_s(plan: Plan, act: Act) -> float:
    """Seconds of one action on one simulated rank."""
    num_shards = plan.mesh.degree((TP, CP))
    stage = plan.stages[act.stage]
    unit_cost = UNIT_COSTS[act.kind]
    flops = unit_cost * stage.flops * plan.micro_size
    return flops / num_shards / SIMULATED_FLOPS
