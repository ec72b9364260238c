"""`weft explain`: the layout of a run and the reasons for it; memory, traffic and FLOPs of its ranks; the check of its world."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from weft.commands.console import check_files, print_json, print_result
from weft.config.command_options import JsonOptions, take_options
from weft.config.fp8 import fp8_notes
from weft.config.run import Run, hardware_of, plan_of
from weft.data.epochs import DataSummary
from weft.errors import EXIT_FAILED, EXIT_OK
from weft.layout.explain import explain as explain_plan
from weft.models import model_label
from weft.start.auto_mesh import choose_mesh
from weft.start.auto_recompute import choose_recompute
from weft.start.checked_run import load_checked_run
from weft.view.explain_page import explain_page

if TYPE_CHECKING:
    from weft.planner.certificate.certificate import Certificate
    from weft.planner.run_costs import RunCosts

USAGE = "[--hardware h100] [--json] [--html FILE]"


class ExplainOptions(JsonOptions):
    """What `weft explain` writes, besides the keys of the run."""

    html: str | None = Field(
        None, title="a file name", examples=["explain.html"], description="write a page, too"
    )


def explain(words: Sequence[str]) -> int:
    """Print the layout at once, then its costs, for which torch is imported and one step of each
    role is played on the meta device. The exit code is 1 where the check of the world fails, or the
    types of a step do not agree: as after a proof that does not hold.
    """
    output, rest = take_options(words, ExplainOptions)
    check_files(output, "html", "json")
    run = load_checked_run(rest, choose_mesh=choose_mesh, choose_recompute=choose_recompute)
    hardware = hardware_of(run)
    plan = plan_of(run)
    layout = explain_plan(plan, kind=run.model.kind)
    if output.json is None:
        print_result(layout)
        for note in fp8_notes(run.precision, run.model):
            print_result(textwrap.fill(note, 80, subsequent_indent="  "))
    num_read = run.steps * run.batch.global_size
    data = DataSummary.of(run.data, run.model, num_read=num_read)
    if output.json is None:
        print_result(data.text)
    from weft.planner.measure.roles import size_problem  # late: they import torch

    problem = size_problem(plan, fixed_order=run.deterministic)
    if problem and output.json is None and output.html is None:
        print_result(f"memory and traffic are not measured: {problem}")
        return EXIT_OK
    from weft.planner.certificate.certificate import certify
    from weft.planner.measure.measured_run import MeasuredRun
    from weft.planner.run_costs import run_costs

    measured = MeasuredRun.of(run)
    costs = run_costs(measured, hardware)
    title = f"{model_label(run.model)} on {plan.mesh}"
    return _explain_costs(
        costs, certify(measured), run, output, layout=layout, title=title, data=data
    )


def _explain_costs(
    costs: RunCosts,
    certificate: Certificate,
    run: Run,
    output: ExplainOptions,
    *,
    layout: str,
    title: str,
    data: DataSummary,
) -> int:
    """Print the costs, or write them to a page.

    Args:
        layout: the plan as text.
        title: of the page.
    """
    from weft.planner.costs_json import costs_json  # late: they import torch
    from weft.planner.report import costs_text
    from weft.planner.simulate.site_costs import site_costs, site_json, site_text

    fields: dict[str, Any] = {"plan": json.loads(plan_of(run).to_json()), **costs_json(costs)}
    fields["data"] = data.to_dict()
    fields["types"] = certificate.to_dict()
    step_s = None if costs.prediction is None else costs.prediction.step.total_s
    sites = site_costs(costs.roles, run.site, step_s=step_s)
    if sites is not None:
        fields["sites"] = site_json(sites)
    if output.html is not None:
        page = explain_page(fields, title=title, layout=layout)
        Path(output.html).write_text(page, encoding="utf-8")
    if output.json is not None:
        print_json(output.json, fields)
    else:
        print_result(costs_text(costs))
        print_result("\n".join(certificate.lines))
        if sites is not None:
            print_result(site_text(sites))
        if output.html is not None:
            print_result(f"wrote {output.html}")
    is_wrong = costs.check.problems or certificate.mismatches
    return EXIT_FAILED if is_wrong else EXIT_OK
