"""Execution of `weft plan --calibrate`: timed steps of short runs, the fit, its report, and the hardware file."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from weft import __version__
from weft.comm.comm import Comm
from weft.commands.console import print_result
from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware, read_fields
from weft.config.hardware_file import EFFICIENCY, next_command, write_fields
from weft.config.load import load
from weft.errors import ConfigError, Fault
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import example_batch
from weft.planner.measure.roles import measure
from weft.run.devices import DeviceChoice, choose_device
from weft.run.launch import launch
from weft.run.rank_setup import open_comm
from weft.run.world import World
from weft.train.build import build_configured_step
from weft.view.quantity import short_time
from weft_plan.calibration.fit import BOUNDS, Calibration, fit
from weft_plan.calibration.measured_steps import MeasuredStep, Residual
from weft_plan.commands.calibrate_options import CalibrateOptions

WARM_UP = 2
BUSY = 0.5
"""Share of the cores from which on other programs disturb the times."""
LR = 1e-4
NAME_COLUMNS = 52
"""Characters that are printed of the words of a run."""
GPU_START = Efficiency(
    gemm=0.5,
    gemm_half=1e5,
    attention=0.3,
    memory=0.7,
    launch_s=5e-6,
    link=0.5,
    network=0.5,
    latency_s=1e-5,
    network_latency_s=1e-5,
    overlap_slowdown=0.15,
)
CPU_START = Efficiency(
    gemm=0.5,
    attention=0.2,
    score_bytes=20.0,
    memory=0.5,
    launch_s=5e-6,
    link=0.5,
    latency_s=1e-4,
    overlap_slowdown=0.5,
)
"""Constants that the fit starts from, where the file has none. On the CPU the exponentials of
attention's scores take as long as 20 bytes of memory traffic each, and a collective takes time of the
cores that compute.
"""


def run_calibration(
    path: str, words_of_runs: Sequence[Sequence[str]], options: CalibrateOptions
) -> int:
    """Time every run, fit, print and write; the exit code."""
    runs = []
    for words in words_of_runs:
        run = load([*words, "--device", options.device], FAMILIES)
        runs.append(MeasuredRun.of(run))
    check_idle(os.getloadavg()[0])
    begin, begin_s = CpuUse.now(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        timed = timed_runs(runs, options, Path(folder))
    if timed.exit_code:
        return timed.exit_code
    check_idle(CpuUse.now().by_others_since(begin) / (time.monotonic() - begin_s))
    steps = []
    for words, measured, seconds in zip(words_of_runs, runs, timed.seconds, strict=True):
        roles = measure(measured)
        steps.append(MeasuredStep(" ".join(words), roles, seconds))
    hardware = find_hardware(path)
    is_cuda = uses_cuda(options.device)
    start = start_of(hardware.efficiency, is_cuda=is_cuda)
    found = fit(steps, hardware, source="", start=start)
    print_result(report(found))
    write_constants(path, found, num_runs=len(steps))
    print_result(f"wrote {path}: {next_command(path)}")
    return 0


def uses_cuda(device: DeviceChoice) -> bool:
    """Whether ranks of this choice compute on GPUs."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def start_of(of_file: Efficiency, *, is_cuda: bool) -> Efficiency:
    """Where the fit starts: at what the file has, which is measured, and elsewhere at plausible
    values.
    """
    start = GPU_START if is_cuda else CPU_START
    assumed = Efficiency()
    measured: dict[str, Any] = {}
    for name in BOUNDS:
        value = getattr(of_file, name)
        if value and value != getattr(assumed, name):
            measured[name] = value
    return replace(start, **measured)


def write_constants(path: str, found: Calibration, *, num_runs: int) -> None:
    """Write the constants into a hardware file, whose source says which are fitted."""
    software = f"weft {__version__}, torch {torch.__version__}, {platform.machine()}"
    source = f"fitted to {num_runs} runs here, {date.today()}, {software}"
    undetermined = []
    for name, error in found.uncertainty.items():
        if error == math.inf:
            undetermined.append(name)
    if undetermined:
        names = ", ".join(undetermined)
        source = f"{source}; not determined by them: {names}"
    constants = replace(found.efficiency, source=source)
    fields = dict(read_fields(path))
    fields[EFFICIENCY] = asdict(constants)
    write_fields(path, fields)


@dataclass(frozen=True)
class CpuUse:
    """Seconds that the cores of this machine have worked.

    Attributes:
        all_s: for all programs.
        own_s: for this process, and its children that have ended.
    """

    all_s: float
    own_s: float

    @staticmethod
    def now() -> CpuUse:
        """Since the machine has started."""
        times = psutil.cpu_times()
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return CpuUse(sum(times) - times.idle - getattr(times, "iowait", 0.0), own_s)

    def by_others_since(self, begin: CpuUse) -> float:
        """CPU seconds that other programs have used since `begin`."""
        return (self.all_s - begin.all_s) - (self.own_s - begin.own_s)


def check_idle(num_busy: float) -> None:
    """Raise a ConfigError where other programs use this machine: constants that are fitted to times
    of a busy machine are of no use.

    Args:
        num_busy: cores that they use on average.
    """
    cores = len(os.sched_getaffinity(0))
    if num_busy >= BUSY * cores:
        what = "other programs use this machine; nothing is written"
        got = f"{num_busy:.1f} of {cores} cores"
        fix = "end them, and wait a minute"
        raise ConfigError(Fault("calibrate", what, got, need=f"below {BUSY * cores:g}", fix=fix))


@dataclass(frozen=True)
class TimedRuns:
    """The exit code of the first launch that failed, or 0; and seconds of a step of each run."""

    exit_code: int
    seconds: tuple[float, ...] = ()


def timed_runs(runs: Sequence[MeasuredRun], options: CalibrateOptions, folder: Path) -> TimedRuns:
    """Time the runs in their order; those of one mesh in a row have one launch."""
    times: list[float] = []
    path = folder / "times.json"
    for mesh, group in groupby(runs, key=lambda run: run.plan.mesh):
        runs_on_mesh = tuple(group)
        main = partial(_rank, runs_on_mesh, options.device, options.steps, path)
        code = launch(main, options.ranks, device=options.device, mesh=mesh)
        if code:
            return TimedRuns(code)
        times.extend(json.loads(path.read_text()))
    return TimedRuns(0, tuple(times))


def _rank(
    runs: Sequence[MeasuredRun], device: DeviceChoice, num_steps: int, path: Path, world: World
) -> None:
    """Entry point of one rank."""
    chosen = choose_device(device, world)
    with open_comm(world, runs[0].plan.mesh, chosen) as comm:
        times = [step_seconds_here(run, comm, num_steps) for run in runs]
    if world.rank == 0:
        path.write_text(json.dumps(times))


def step_seconds_here(run: MeasuredRun, comm: Comm, num_steps: int) -> float:
    """Median seconds of a step of this run on these ranks."""
    step = build_configured_step(run.config, run.plan, comm)
    batches = example_batches(run, comm)
    times = []
    for number in range(WARM_UP + num_steps):
        comm.checked = number < WARM_UP
        begin = time.perf_counter()
        step(batches, lr=LR)
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


def example_batches(run: MeasuredRun, comm: Comm) -> list[Batch]:
    """The micro-batches of a step of this rank: ones."""

    def ones(tensor: Tensor) -> Tensor:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=comm.device)

    batch = example_batch(run, comm).map(ones)
    return [batch] * run.plan.microbatches


def report(found: Calibration) -> str:
    """Constants with their uncertainty, and residuals."""
    lines = ["constants (standard error):"]
    for name, error in found.uncertainty.items():
        value = getattr(found.efficiency, name)
        doubt = "not determined by these runs: stays where it was"
        if error != math.inf:
            doubt = f"+- {100 * error:.0f}%"
        lines.append(f"  {name:<18} {value:.4g}  {doubt}")
    lines.append("runs, measured and predicted:")
    lines.extend(_residual_line(residual) for residual in found.residuals)
    low, high = found.range
    percent = 100 * found.median_error
    lines.append(
        f"median error {percent:.0f}%; 80% of measured times are expected at"
        f" {low:.2f} to {high:.2f} of the predicted ones"
    )
    return "\n".join(lines)


def _residual_line(residual: Residual) -> str:
    measured = short_time(residual.measured_s)
    predicted = short_time(residual.predicted_s)
    percent = 100 * residual.error
    name = residual.name
    for left_out in ("--", "model.", "batch."):
        name = name.replace(left_out, "")
    return f"  {measured:>8} {predicted:>8} {percent:+4.0f}%  {name[:NAME_COLUMNS]}"
