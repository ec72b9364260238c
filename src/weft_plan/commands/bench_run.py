"""`weft bench` on its ranks: measure, and on rank 0 print and write the results."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from weft.comm.comm import Comm
from weft.commands.console import print_result
from weft.config.command_options import STANDARD_OUTPUT
from weft.config.hardware import DeviceType
from weft.config.hardware_file import next_command, write_fields
from weft.core.mesh import Mesh
from weft.errors import counted
from weft.parallel.dp import AXIS as DP
from weft.run.devices import DeviceChoice, choose_device, find_gpus
from weft.run.launch import join, launch
from weft.run.rank_setup import open_comm
from weft.run.world import World, num_cores
from weft.start.messages import print_error
from weft.view.log_plot import log_plot
from weft_plan.bench.bandwidth import OperationName, byte_sizes
from weft_plan.bench.communication import CommReport, Workload, ignore_rows, measure_communication
from weft_plan.bench.computation import SUITES, ComputeTimes, measure_computation
from weft_plan.bench.figures import (
    MeasuredFigures,
    comm_figures,
    compute_figures,
    machine_memory_bytes,
    processor_name,
)
from weft_plan.bench.record import extended, versions_of
from weft_plan.bench.tables import (
    CommTable,
    comm_footer,
    comm_json,
    comm_panels,
    compute_json,
    compute_lines,
    figure_lines,
    with_origin,
)
from weft_plan.commands.bench_options import BenchOptions, CommOptions, ComputeOptions, SizeRange

DEFAULT_LARGEST = {"cpu": 2**24, "cuda": 2**30}
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """What rank 0 prints and writes.

    Attributes:
        lines: of the tables.
        json_fields: every measured time.
        figures: for the hardware file.
    """

    lines: tuple[str, ...]
    json_fields: Fields
    figures: MeasuredFigures


def run_comm(
    options: CommOptions,
    *,
    mesh: Mesh,
    world: World | None,
    operations: Sequence[str],
    sizes: SizeRange,
    fields: Fields | None,
) -> int:
    """Measure collectives on the ranks of a launcher, or on local ones; the exit code."""
    names = cast(tuple[OperationName, ...], tuple(operations))

    def measure(comm: Comm, own: World) -> None:
        largest = sizes.largest or DEFAULT_LARGEST[comm.device.type]
        steps = tuple(byte_sizes(sizes.smallest, largest, factor=sizes.factor))
        workload = Workload(names, steps, options.seconds)
        on_rows = CommTable(partial(print_at_once, options)).add if comm.rank == 0 else ignore_rows
        report = measure_communication(comm, workload, on_rows=on_rows)
        if comm.rank == 0:
            _report_comm(options, report, comm, own.local_size, fields)

    main = partial(_on_rank, measure, mesh, options.device)
    if world is not None:
        return join(main, world, mesh=mesh)
    return launch(main, mesh.size, transport=options.transport, device=options.device, mesh=mesh)


def run_compute(options: ComputeOptions, *, fields: Fields | None) -> int:
    """Measure kernels on local ranks; the exit code."""
    is_gpu = options.device == "cuda" or (options.device == "auto" and find_gpus().num_visible > 0)
    num_ranks = options.ranks or (1 if is_gpu else num_cores())
    mesh = Mesh.parse(f"{DP}{num_ranks}")

    def measure(comm: Comm, own: World) -> None:
        suite = SUITES[comm.device.type]
        times = measure_computation(comm, suite, budget_s=options.seconds)
        if comm.rank == 0:
            _report_compute(options, times, comm, num_ranks, fields)

    main = partial(_on_rank, measure, mesh, options.device)
    return launch(main, num_ranks, device=options.device, mesh=mesh)


def _on_rank(
    measure: Callable[[Comm, World], None], mesh: Mesh, device: DeviceChoice, world: World
) -> None:
    """Entry point of one rank."""
    chosen = choose_device(device, world)
    on_gpu = torch.cuda.device(chosen) if chosen.type == "cuda" else nullcontext()
    with on_gpu, open_comm(world, mesh, chosen) as comm:
        measure(comm, world)


def _report_comm(
    options: CommOptions, report: CommReport, comm: Comm, local_size: int, fields: Fields | None
) -> None:
    device = comm.device
    figures = comm_figures(
        report.rows, device=_type_of(device), label=device_label(device), node=local_size
    )
    _publish(
        options,
        Results(("", comm_footer(report)), comm_json(report), figures),
        comm=comm,
        fields=fields,
    )
    if options.svg is not None:
        versions = versions_of(comm)
        text = log_plot(
            comm_panels(report),
            title=f"{device_label(device)}; {versions}",
            x_label="size of the large tensor",
            y_label="bus bandwidth, GB/s",
        )
        _write(options, options.svg, text)


def _type_of(device: torch.device) -> DeviceType:
    return "cuda" if device.type == "cuda" else "cpu"


def _report_compute(
    options: ComputeOptions,
    times: Sequence[ComputeTimes],
    comm: Comm,
    num_ranks: int,
    fields: Fields | None,
) -> None:
    device = comm.device
    is_gpu = device.type == "cuda"
    node = torch.cuda.device_count() if is_gpu else num_ranks
    figures = compute_figures(
        times,
        device=_type_of(device),
        label=device_label(device),
        node=node,
        memory_bytes=device_memory_bytes(device, num_ranks),
    )
    threads = counted(torch.get_num_threads(), "thread")
    where = f"{counted(num_ranks, 'rank')} at once" + ("" if is_gpu else f", {threads} each")
    _publish(
        options,
        Results((where, "", *compute_lines(times)), compute_json(times), figures),
        comm=comm,
        fields=fields,
    )


def device_label(device: torch.device) -> str:
    """The name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def device_memory_bytes(device: torch.device, num_ranks: int) -> float:
    """Memory of a GPU, or a rank's part of the machine's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes() / num_ranks


def _publish(options: BenchOptions, results: Results, *, comm: Comm, fields: Fields | None) -> None:
    """Print the tables and write the files that are asked for."""
    day = date.today()
    versions = versions_of(comm)
    print_at_once(options, "\n".join([*results.lines, *figure_lines(results.figures)]))
    if options.json is not None:
        content = with_origin(
            results.json_fields,
            day=day.isoformat(),
            versions=versions,
            device=device_label(comm.device),
        )
        text = json.dumps(content, indent=1)
        if options.json == STANDARD_OUTPUT:
            print_result(text)
        else:
            _write(options, options.json, f"{text}\n")
    if options.write is not None and fields is not None:
        write_fields(options.write, extended(fields, results.figures, day=day, versions=versions))
        print_at_once(options, f"wrote {options.write}: {next_command(options.write)}")


def print_at_once(options: BenchOptions, line: str) -> None:
    """Print a line of a long measurement when it is known, also into a pipe; on stderr where stdout
    has the JSON.
    """
    if options.json == STANDARD_OUTPUT:
        print_error(line)
        return
    print_result(line)
    sys.stdout.flush()


def _write(options: BenchOptions, path: str, text: str) -> None:
    part = f"{path}.part"
    Path(part).write_text(text, encoding="utf-8")
    os.replace(part, path)
    print_at_once(options, f"wrote {path}")
