"""`weft explain`: the layout of a run and the reasons for it, and the memory, traffic and FLOPs of its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

from weft.commands.console import load_checked_run, print_result
from weft.config.hardware import find_hardware
from weft.config.run import plan_of
from weft.errors import EXIT_OK
from weft.layout.explain import explain as explain_plan

JSON_FLAG = "--json"


def explain(words: Sequence[str]) -> int:
    """Print the layout at once, then its costs, for which torch is imported and one step of each
    role is played on the meta device.
    """
    config_words = [word for word in words if word != JSON_FLAG]
    run = load_checked_run(config_words)
    hardware = None
    if run.hardware:
        hardware = find_hardware(run.hardware).for_matmul(run.precision.matmul)
    plan = plan_of(run)
    if JSON_FLAG not in words:
        print_result(explain_plan(plan))
    from weft.planner.measure import measure, size_problem  # late: they import torch
    from weft.planner.report import costs_json, costs_text
    from weft.planner.site_costs import site_costs, site_json, site_text
    from weft.planner.speeds import Speeds
    from weft.planner.step_time import step_time

    problem = size_problem(plan)
    if problem and JSON_FLAG not in words:
        print_result(f"memory and traffic are not measured: {problem}")
        return EXIT_OK
    roles = measure(run)
    step_s = None
    if hardware is not None:
        step_s = step_time(roles, Speeds(hardware, hardware.efficiency)).total_s
    sites = site_costs(roles, run.site, step_s=step_s)
    if JSON_FLAG in words:
        fields = {"plan": json.loads(plan.to_json()), **costs_json(roles, hardware)}
        if sites is not None:
            fields["sites"] = site_json(sites)
        print_result(json.dumps(fields, indent=1))
    else:
        print_result(costs_text(roles, hardware))
        if sites is not None:
            print_result(site_text(sites))
    return EXIT_OK
