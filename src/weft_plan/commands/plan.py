"""`weft plan`: the best layout of a run on a number of devices, by predicted time, memory or price."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from weft.commands.console import check_files, print_json, print_result, show_help, wants_help
from weft.config.command_options import STANDARD_OUTPUT, JsonOptions, take_options
from weft.config.schema import SiteConfig
from weft.errors import EXIT_FAILED, EXIT_OK, ConfigError
from weft.models import model_label
from weft.view.quantity import percent
from weft_plan.commands.schedule import write_picture
from weft_plan.commands.searched_run import SearchedRun
from weft_plan.entries import PLAN
from weft_plan.search.candidates import Candidates
from weft_plan.search.layout_choice import Layout

if TYPE_CHECKING:
    from weft.planner.simulate.site_costs import SiteCosts
    from weft_plan.search.found_layouts import Found, FoundLayouts
    from weft_plan.search.layout_costs import LayoutCosts
    from weft_plan.search.plan_report import Rates
    from weft_plan.search.scaling import ScaledLayout, Scaling

MORE_HELP = (
    "Any key of `weft train` as well: layouts keep those of the mesh, ZeRO, recomputation, schedule and batch that are given. "
    "weft plan --calibrate --help: fit the constants of this machine"
)
ORDER_OF = {"time": "fastest first", "memory": "least memory first", "cost": "cheapest first"}


class PlanOptions(JsonOptions):
    """What `weft plan` looks for; keys of the run that are given stay as they are."""

    devices: Annotated[int, Field(ge=1, le=2**20)] | None = Field(
        None, description="number of devices; None: the size of --mesh"
    )
    target: Literal["time", "memory", "cost"] = Field(
        "time", description="least time of a step, memory of a rank, or price of a token"
    )
    top: int = Field(3, ge=1, le=50, description="layouts that are printed")
    measured: int = Field(8, ge=1, le=1000, description="layouts that are measured as a whole")
    seconds: Annotated[float, Field(gt=0)] = Field(
        45.0, description="seconds of one core; then the search ends with what it has found"
    )
    headroom: float = Field(
        0.1, ge=0, lt=1, description="share of a device's memory that stays free"
    )
    price_usd_h: Annotated[float, Field(gt=0)] | None = Field(
        None, description="dollars an hour and device; None: of the hardware file"
    )
    power_w: Annotated[float, Field(gt=0)] | None = Field(
        None, description="watts of a device; None: of the hardware file"
    )
    why: str | None = Field(None, description='what is wrong with a layout: "tp8 pp4 dp8 zero1"')
    scale: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] = Field(
        (), description="numbers of devices, for weak and strong scaling: 64 128 256"
    )
    svg: str | None = Field(
        None,
        title="a file name",
        examples=["plan.svg"],
        description="draw time and memory of the layouts, and their Pareto front, to this file",
    )
    write: str | None = Field(
        None,
        title="a file name",
        examples=["run.toml"],
        description="write the run with the best layout to this file",
    )


def plan(words: Sequence[str]) -> int:
    """Print the best layouts, why they are, and the command of the best one."""
    if wants_help(words):
        return show_help(PlanOptions(), f"weft plan {PLAN.usage}", f"{PLAN.line}. {MORE_HELP}")
    options, run_words = take_options(words, PlanOptions)
    check_files(options, "json", "svg")
    searched = SearchedRun.read(run_words, options.devices)
    found = searched.candidates()
    named = None if options.why is None else searched.named_layout(options.why)
    faults = tuple(searched.scale_faults(options.scale))
    if faults:
        raise ConfigError(*faults)
    return _search(searched, options, found, named)


@dataclass(frozen=True)
class _PlanAnswer:
    """What a search has found.

    Attributes:
        best: the layout that is recommended; of several numbers of devices, where their prices are
            compared.
        scaled: the best layouts on the numbers of devices of `scale`.
    """

    result: FoundLayouts
    best: Layout
    scaled: Mapping[Scaling, Sequence[ScaledLayout]]
    rates: Rates
    num_shown: int


def _search(
    searched: SearchedRun, options: PlanOptions, found: Candidates, named: Layout | None
) -> int:
    """Search the candidates, and print what is found.

    Args:
        named: the layout of `--why`.
    """
    from weft_plan.search.front_picture import front_svg  # late: they import torch
    from weft_plan.search.limits import SearchLimits
    from weft_plan.search.plan_report import Rates, nothing_fits_text
    from weft_plan.search.search import search
    from weft_plan.search.why_not import too_large_lines, why_lines

    hardware = searched.hardware
    costs = searched.costs()
    rates = Rates(options.price_usd_h or hardware.price_usd_h, options.power_w or hardware.power_w)
    capacity = (1 - options.headroom) * hardware.memory_bytes
    reorders = "mesh" not in searched.pinned
    limits = SearchLimits(capacity, options.measured, options.seconds, reorders=reorders)
    progress = _show_progress if sys.stderr.isatty() else None
    result = search(found, costs, limits, target=options.target, progress=progress)
    if progress is not None:
        progress("")
    if not result.best:
        lines = nothing_fits_text(result, capacity)
        if named is not None:
            lines.extend(too_large_lines(named, costs, capacity))
        print_result("\n".join(lines))
        return EXIT_FAILED
    best = result.headline.layout
    scaled = _scaled(searched, options, costs) if options.scale else {}
    if options.target == "cost" and scaled:
        best = _cheapest_layout(scaled, best)
    is_named = options.json != STANDARD_OUTPUT
    if options.write is not None:
        write_picture("write", options.write, searched.config_text(best), is_named=is_named)
    if options.svg is not None:
        title = f"{_title(searched, result)}, {hardware.label}"
        picture = front_svg(result, capacity, title=title)
        write_picture("svg", options.svg, picture, is_named=is_named)
    answer = _PlanAnswer(result, best, scaled, rates, options.top)
    if options.json is not None:
        return print_json(options.json, _answer_json(answer, searched))
    if named is None:
        why = []
    else:
        why = why_lines(named, result, costs, capacity, rates)
    speeds = costs.speeds.efficiency.source
    head = _head(searched, answer, speeds, order=ORDER_OF[options.target])
    print_result("\n".join([*head, *_answer_lines(answer, searched, why)]))
    return EXIT_OK


def _show_progress(text: str) -> None:
    """Replace the line of progress."""
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


def _answer_json(answer: _PlanAnswer, searched: SearchedRun) -> dict[str, Any]:
    from weft.planner.simulate.site_costs import site_json
    from weft_plan.search.plan_report import scaling_json, search_json

    fields = search_json(answer.result, answer.rates, num_shown=answer.num_shown)
    scaling = {}
    for kind, rows in answer.scaled.items():
        scaling[kind] = scaling_json(rows, answer.rates)
    fields["scaling"] = scaling
    fields["command"] = searched.command(answer.best)
    sites = site_costs_of(answer.result.best[0], searched.site)
    fields["sites"] = None if sites is None else site_json(sites)
    return fields


def _answer_lines(answer: _PlanAnswer, searched: SearchedRun, why: Sequence[str]) -> list[str]:
    """The answer for a reader, below its head.

    Args:
        why: lines on the layout of `--why`.
    """
    from weft_plan.search.plan_report import search_text

    return [
        *search_text(answer.result, answer.rates, num_shown=answer.num_shown),
        *_site_lines(answer.result.best[0], searched.site),
        *why,
        *_scale_lines(answer.scaled, answer.rates),
        "the best one as a command:",
        searched.command(answer.best),
    ]


def _head(searched: SearchedRun, answer: _PlanAnswer, speeds: str, *, order: str) -> list[str]:
    """What is searched, on what, and the order of the layouts, in 80 columns.

    Args:
        speeds: where they come from.
    """
    from weft_plan.search.plan_report import wrapped

    looked_at = percent(answer.result.share_looked_at)
    texts = [
        f"{_title(searched, answer.result)}, {order}; {looked_at} looked at",
        f"{searched.hardware.label}; speeds: {speeds}",
    ]
    note = searched.hardware.slow_compute_note(searched.compute_dtype)
    if note:
        texts.append(note)
    lines: list[str] = []
    for text in texts:
        lines.extend(wrapped(text))
    return lines


def _title(searched: SearchedRun, result: FoundLayouts) -> str:
    num_devices = math.prod(degree for _, degree in result.best[0].layout.degrees)
    return f"layouts of {model_label(searched.model)} on {num_devices} devices"


def site_costs_of(best: Found, settings: SiteConfig) -> SiteCosts | None:
    """The exchange between sites of a layout; None without sites."""
    from weft.planner.simulate.site_costs import site_costs

    return site_costs(best.prediction.roles, settings, step_s=best.seconds)


def _site_lines(best: Found, settings: SiteConfig) -> list[str]:
    from weft.planner.simulate.site_costs import site_text

    costs = site_costs_of(best, settings)
    if costs is None:
        return []
    return ["steps are those inside of a site. Of the best layout:", site_text(costs)]


def _scaled(
    searched: SearchedRun, options: PlanOptions, costs: LayoutCosts
) -> dict[Scaling, list[ScaledLayout]]:
    """The best layouts on the numbers of devices of `scale`; they share the seconds of a search."""
    from weft_plan.search.scaling import scaling

    kinds: tuple[Scaling, ...] = ("strong", "weak")
    found = {}
    for kind in kinds:
        found[kind] = scaling(
            searched.keys,
            costs,
            sorted(options.scale),
            pinned=searched.pinned,
            kind=kind,
            memory_bytes=(1 - options.headroom) * costs.speeds.hardware.memory_bytes,
            seconds=options.seconds / len(kinds),
        )
    return found


def _cheapest_layout(scaled: Mapping[Scaling, Sequence[ScaledLayout]], other: Layout) -> Layout:
    """The layout with the least price of a token among those with the same batch."""
    from weft_plan.search.plan_report import cheapest

    row = cheapest(scaled["strong"])
    if row is None or row.best is None:
        return other
    return row.best.layout


def _scale_lines(scaled: Mapping[Scaling, Sequence[ScaledLayout]], rates: Rates) -> list[str]:
    from weft_plan.search.plan_report import cheapest, scaling_text, wrapped

    titles: dict[Scaling, str] = {
        "strong": "strong scaling (the same batch on all):",
        "weak": "weak scaling (a batch that grows with the devices):",
    }
    lines = []
    for kind, rows in scaled.items():
        lines.extend(scaling_text(titles[kind], rows, rates))
    row = cheapest(scaled.get("strong", ()))
    if row is not None and row.best is not None:
        text = f"least cost of a token with this batch: {row.num_devices} devices, {row.best.layout.text}"
        lines.extend(wrapped(text))
    return lines
