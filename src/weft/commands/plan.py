"""`weft plan`: the best layout of a run on a number of devices, by predicted time, memory or price."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from weft.commands.auto_mesh import one_rank
from weft.commands.console import load_checked_run, print_result, show_help, split_words, wants_help
from weft.config import flags, toml
from weft.config.checks import as_flags, run_checks
from weft.config.hardware import Hardware, world_faults
from weft.config.load import AUTO_MESH
from weft.config.run import Run, hardware_of
from weft.config.schema import ConfigSection, SiteConfig
from weft.config.validate import config_checks
from weft.core.dimension import local_update_axes
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, EXIT_OK, ConfigError, Fault, UserError
from weft.planner.search.candidates import Candidates, Space, candidates, nearest_devices
from weft.planner.search.layout_choice import SEARCHED, Layout, read_layout

if TYPE_CHECKING:
    from weft.planner.search.found_layouts import Found
    from weft.planner.search.layout_costs import LayoutCosts
    from weft.planner.search.plan_report import Rates
    from weft.planner.search.scaling import ScaledLayout, Scaling
    from weft.planner.simulate.site_costs import SiteCosts

USAGE = "[CONFIG.toml] --devices 256 --hardware h100 [--json] [--key value ...]"
LINE = "search the best layout for a number of devices"
MORE_HELP = (
    "Any key of weft train as well: layouts keep those of the mesh, ZeRO, recomputation, schedule and batch that are given. "
    "weft plan --calibrate --help: fit the constants of this machine"
)
ORDER_OF = {"time": "fastest first", "memory": "least memory first", "cost": "cheapest first"}
JSON_FLAG = "--json"
ALWAYS_NAMED = frozenset({"mesh", "batch.micro_size", "parallel.zero"})
"""Keys that the command of the best layout names in any case."""


class PlanOptions(ConfigSection):
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
    write: str | None = Field(
        None,
        title="a file name",
        examples=["run.toml"],
        description="write the run with the best layout to this file",
    )


def plan(words: Sequence[str]) -> int:
    """Print the best layouts, why they are, and the command of the best one."""
    if wants_help(words):
        return show_help(PlanOptions(), f"weft plan {USAGE}", f"{LINE}. {MORE_HELP}")
    is_json = JSON_FLAG in words
    without_json = [word for word in words if word != JSON_FLAG]
    own, run_words = split_words(without_json, PlanOptions)
    options = flags.read_config(own, PlanOptions)
    pinned = _pinned(run_words)
    run = load_checked_run(
        run_words,
        adapt=lambda run: _plain(run, pinned),
        choose_mesh=one_rank,
    )
    hardware = _hardware(run)
    if _is_sites_alone(run.device_mesh, options):
        pinned -= {"mesh"}
    num_devices = _num_devices(options.devices, run.device_mesh.size, pinned)
    faults = tuple(world_faults(hardware, num_devices))
    if faults:
        raise ConfigError(*faults)
    sites = () if "mesh" in pinned else _sites(run.device_mesh)
    space = Space(num_devices, hardware.node, pinned, sites)
    found = candidates(run, space)
    if not found.groups:
        raise ConfigError(_no_layout(run, space, found))
    named = None if options.why is None else _named_layout(options.why, run, num_devices)
    faults = tuple(_scale_faults(run, options, hardware, pinned))
    if faults:
        raise ConfigError(*faults)
    return _search(
        run,
        run_words,
        options,
        found,
        hardware,
        pinned=pinned,
        named=named,
        is_json=is_json,
    )


def _pinned(words: Sequence[str]) -> frozenset[str]:
    """Keys of the search that flags or the config file give."""
    given = flags.split(words)
    names = {name for name, _ in given.flags}
    for path in given.loose:
        if path.endswith(".toml") and Path(path).is_file():
            values = toml.read(path)
            names.update(key for key in values if (key, values[key]) != ("mesh", AUTO_MESH))
    return frozenset(names & SEARCHED)


def _plain(run: Run, pinned: frozenset[str]) -> Run:
    """The run with one rank and sequences that fit any batch, as far as these are searched."""
    values: dict[str, Any] = {}
    if "batch.micro_size" not in pinned:
        values["batch.micro_size"] = 1
    return run.with_values(values)


def _sites(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """The axis of sites of a mesh, with its degree."""
    return tuple(each for each in mesh.axes if each[0] in local_update_axes())


def _is_sites_alone(mesh: Mesh, options: PlanOptions) -> bool:
    """Whether a mesh names sites and no axis inside of them, which are searched then."""
    has_devices_inside = options.devices is not None and options.devices != mesh.size
    return bool(mesh.axes) and mesh.axes == _sites(mesh) and has_devices_inside


def _hardware(run: Run) -> Hardware:
    hardware = hardware_of(run)
    if hardware is None:
        need = "a name or a hardware file"
        raise ConfigError(Fault("hardware", "no device is named", need=need, fix="--hardware h100"))
    return hardware


def _num_devices(given: int | None, size: int, pinned: frozenset[str]) -> int:
    """The number that is given; else that of a mesh of `size` ranks, if it is pinned."""
    if given is None:
        if "mesh" not in pinned:
            raise ConfigError(Fault("devices", "no number is given", fix="--devices 256"))
        return size
    if "mesh" in pinned and given != size:
        fix = f"--devices {size}, or leave one of them out"
        got = f"--devices {given}, --mesh of {size}"
        raise ConfigError(Fault("devices", "differ from the mesh", got, fix=fix))
    return given


def _named_layout(text: str, run: Run, num_devices: int) -> Layout:
    """The layout that `--why` names.

    Raises:
        ConfigError: it is not legal, has another number of devices, or a word is no part of it.
    """
    try:
        layout = read_layout(text, run)
    except UserError as error:
        raise ConfigError(*_faults_of_why(error.faults, text)) from None
    size = Mesh.parse(layout.mesh).size
    if size != num_devices:
        need = str(num_devices)
        raise ConfigError(Fault("why", "has another number of devices", str(size), need))
    faults = run_checks(layout.applied_to(run), config_checks)
    if faults:
        raise ConfigError(*_faults_of_why(faults, text))
    return layout


def _faults_of_why(faults: Sequence[Fault], text: str) -> Iterator[Fault]:
    """Faults of a layout as faults of the flag that names it."""
    for fault in faults:
        what = f"{text!r} is not legal: {fault.key}: {fault.what}"
        yield replace(fault, key="why", what=what)


def _no_layout(run: Run, space: Space, found: Candidates) -> Fault:
    """Why no layout fills the devices, and the nearest numbers that one fills."""
    reasons = [reason for reason, _ in found.illegal.most_common(2)]
    near = nearest_devices(run, space)
    fix = " or ".join(f"--devices {number}" for number in near)
    return Fault(
        "devices",
        f"no layout fills {space.num_devices}",
        got="; ".join(reasons),
        fix=fix,
    )


def _scale_faults(
    run: Run, options: PlanOptions, hardware: Hardware, pinned: frozenset[str]
) -> Iterator[Fault]:
    """Numbers of devices in `scale` that no layout fills."""
    for size in options.scale:
        yield from world_faults(hardware, size)
        space = Space(size, hardware.node, pinned - {"mesh"})
        if not candidates(run, space).groups:
            yield replace(_no_layout(run, space, candidates(run, space)), key="scale")


def _search(
    run: Run,
    run_words: Sequence[str],
    options: PlanOptions,
    found: Candidates,
    hardware: Hardware,
    *,
    pinned: frozenset[str],
    named: Layout | None,
    is_json: bool,
) -> int:
    from weft.planner.search.layout_costs import LayoutCosts  # late: they import torch
    from weft.planner.search.limits import SearchLimits
    from weft.planner.search.plan_report import (
        Rates,
        nothing_fits_text,
        scaling_json,
        search_json,
        search_text,
    )
    from weft.planner.search.search import search
    from weft.planner.search.why_not import too_large_lines, why_lines
    from weft.planner.simulate.site_costs import site_json
    from weft.planner.simulate.speeds import Speeds

    costs = LayoutCosts(run, Speeds(hardware))
    rates = Rates(
        options.price_usd_h or hardware.price_usd_h,
        options.power_w or hardware.power_w,
    )
    capacity = (1 - options.headroom) * hardware.memory_bytes
    limits = SearchLimits(capacity, options.measured, options.seconds)
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
    best = result.best[0].layout
    scaled = _scaled(options, costs, pinned) if options.scale else {}
    if options.target == "cost" and scaled:
        best = _cheapest_layout(scaled, best)
    if options.write is not None:
        text = toml.dump(best.applied_to(run))
        _write(options.write, text)
    if is_json:
        fields = search_json(result, rates, num_shown=options.top)
        fields["scaling"] = {kind: scaling_json(rows, rates) for kind, rows in scaled.items()}
        fields["command"] = command_of(run, run_words, best)
        sites = site_costs_of(result.best[0], run.site)
        fields["sites"] = None if sites is None else site_json(sites)
        print_result(json.dumps(fields, indent=1))
        return EXIT_OK
    speeds = costs.speeds.efficiency.source
    num_devices = math.prod(degree for _, degree in result.best[0].layout.degrees)
    lines = _head(run, hardware, speeds, num_devices=num_devices, target=options.target)
    lines.extend(search_text(result, rates, num_shown=options.top))
    lines.extend(_site_lines(result.best[0], run.site))
    if named is not None:
        lines.extend(why_lines(named, result, costs, capacity, rates))
    lines.extend(_scale_lines(scaled, rates))
    command = command_of(run, run_words, best)
    print_result("\n".join([*lines, "the best one as a command:", command]))
    return EXIT_OK


def _show_progress(text: str) -> None:
    """Replace the line of progress."""
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


def _head(run: Run, hardware: Hardware, speeds: str, *, num_devices: int, target: str) -> list[str]:
    """What is searched, on what, and the order of the layouts, in 80 columns."""
    from weft.planner.search.plan_report import wrapped

    model = _model_label(run)
    lines = [
        f"layouts of {model} on {num_devices} devices, {ORDER_OF[target]}",
        f"{hardware.label}; speeds: {speeds}",
    ]
    note = hardware.slow_compute_note(run.precision.compute)
    if note:
        lines.append(note)
    return [part for line in lines for part in wrapped(line)]


def _model_label(run: Run) -> str:
    """Its preset, and whether it has other sizes than that."""
    from weft.models import PRESETS

    preset = PRESETS.get(run.model.preset or "")
    if preset is None or run.model.architecture == preset.model_dump():
        return run.model.label
    return f"{run.model.label} with other sizes"


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


def command_of(run: Run, run_words: Sequence[str], best: Layout) -> str:
    """The run with the best layout as a command: the words without keys of the search, and the
    values of the layout that are not the run's.
    """
    given = flags.split(run_words)
    words = ["weft", "train", *given.loose]
    for name, values in given.flags:
        if name not in SEARCHED:
            words.extend([f"--{name}", *values])
    own = best.applied_to(run)
    changed = {}
    for key, value in best.values.items():
        is_same = value_of(run, key) == value_of(own, key)
        if key in ALWAYS_NAMED or not is_same:
            changed[key] = value
    return f"{shlex.join(words)} {as_flags(changed)}"


def value_of(run: Run, key: str) -> object:
    """The value of a key of a run: `parallel.zero`."""
    value: object = run
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write the file: {error.strerror}"
        raise ConfigError(
            Fault("write", what, got=repr(path), fix="choose another --write")
        ) from None
    print_result(f"wrote {path}")


def _scaled(
    options: PlanOptions, costs: LayoutCosts, pinned: frozenset[str]
) -> dict[Scaling, list[ScaledLayout]]:
    """The best layouts on the numbers of devices of `scale`; they share the seconds of a search."""
    from weft.planner.search.scaling import scaling

    kinds: tuple[Scaling, ...] = ("strong", "weak")
    found = {}
    for kind in kinds:
        found[kind] = scaling(
            costs,
            sorted(options.scale),
            pinned,
            kind=kind,
            memory_bytes=(1 - options.headroom) * costs.speeds.hardware.memory_bytes,
            seconds=options.seconds / len(kinds),
        )
    return found


def _cheapest_layout(scaled: Mapping[Scaling, Sequence[ScaledLayout]], other: Layout) -> Layout:
    """The layout with the least price of a token among those with the same batch."""
    from weft.planner.search.plan_report import cheapest

    row = cheapest(scaled["strong"])
    return other if row is None or row.best is None else row.best.layout


def _scale_lines(scaled: Mapping[Scaling, Sequence[ScaledLayout]], rates: Rates) -> list[str]:
    from weft.planner.search.plan_report import cheapest, scaling_text, wrapped

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
