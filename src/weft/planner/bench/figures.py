"""Figures of a device from measured times, as a hardware file holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import psutil

from weft.config.hardware import GB, PEAK_FIELDS
from weft.planner.bench.bandwidth import RINGS, GroupTimes, Placement
from weft.planner.bench.computation import TF32, ComputeTimes

PEAKS = {**PEAK_FIELDS, TF32: "tf32_tflops"}
MAIN_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""Type whose shares stand for all types, by type of device."""
BANDWIDTHS: dict[Placement, str] = {"inside": "link", "between": "network"}


@dataclass(frozen=True)
class ReachedShare:
    """A share of a figure that real work reaches."""

    figure: str
    value: float


@dataclass(frozen=True)
class MeasuredFigures:
    """What a measurement says about a device.

    Attributes:
        program: that measured, for the origin of the figures.
        node: ranks of a node.
        figures: name in the hardware file -> value.
        shares: field of `Efficiency` -> share of one of the figures.
        costs: field of `Efficiency` -> seconds.
    """

    program: str
    label: str
    node: int
    figures: Mapping[str, float]
    shares: Mapping[str, ReachedShare] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)


def compute_figures(
    times: Sequence[ComputeTimes],
    *,
    device_type: str,
    label: str,
    node: int,
    memory_bytes: float,
) -> MeasuredFigures:
    """Peaks are the best measured; shares are medians of the shapes."""
    figures = {"memory_gb": memory_bytes / GB}
    for dtype, name in PEAKS.items():
        rates = [row.tflops for row in times if row.work.kind == "gemm" and row.work.dtype == dtype]
        if rates:
            figures[name] = max(rates)
    bandwidths = [row.tb_s for row in times if row.work.kind == "memory"]
    figures["hbm_tb_s"] = max(bandwidths)
    launch_s = next(row.median_s for row in times if row.work.kind == "launch")
    main = MAIN_DTYPES[device_type]
    shares = {"memory": ReachedShare("hbm_tb_s", median(bandwidths) / max(bandwidths))}
    for kind in ("gemm", "attention"):
        rows = [row for row in times if row.work.kind == kind and row.work.dtype == main]
        reached = [arithmetic_share(row, figures, PEAKS[main], launch_s) for row in rows]
        shares[kind] = ReachedShare(PEAKS[main], median(reached))
    return MeasuredFigures(
        program="weft bench compute",
        label=label,
        node=node,
        figures=figures,
        shares=shares,
        costs={"launch_s": launch_s},
    )


def arithmetic_share(
    row: ComputeTimes, figures: Mapping[str, float], peak: str, launch_s: float
) -> float:
    """ReachedShare of the peak that the arithmetic reaches, in the time that launch and memory leave; at
    least half of the time is arithmetic's, as small operands stay in caches.
    """
    memory_s = row.work.num_bytes / (figures["hbm_tb_s"] * 1e12)
    seconds = max(row.median_s - launch_s - memory_s, row.median_s / 2)
    return row.work.flops / seconds / (figures[peak] * 1e12)


def comm_figures(rows: Sequence[GroupTimes], *, label: str, node: int) -> MeasuredFigures:
    """The bandwidth of a rank inside and between nodes is the best measured; the share is what the
    rings reach with the largest size, the latency what a step of a ring takes with the smallest.
    """
    figures: dict[str, float] = {}
    shares: dict[str, ReachedShare] = {}
    costs: dict[str, float] = {}
    for placement, name in BANDWIDTHS.items():
        placed = [row for row in rows if row.placement == placement]
        slowest = slowest_groups(row for row in placed if row.operation in (*RINGS, "send_recv"))
        if not slowest:
            continue
        figure = f"{name}_gb_s"
        figures[figure] = max(row.device_gb_s for row in slowest)
        shares[name] = ReachedShare(figure, ring_bandwidth(slowest) / figures[figure])
        latency = "latency_s" if placement == "inside" else "network_latency_s"
        costs[latency] = step_latency(slowest)
    return MeasuredFigures(
        program="weft bench comm",
        label=label,
        node=node,
        figures=figures,
        shares=shares,
        costs=costs,
    )


def slowest_groups(rows: Iterable[GroupTimes]) -> list[GroupTimes]:
    """Of groups that did the same at the same time, the slowest."""
    slowest: dict[tuple[str, str, int, str], GroupTimes] = {}
    for row in rows:
        key = (row.axis, row.operation, row.size_bytes, row.placement)
        if key not in slowest or row.median_s > slowest[key].median_s:
            slowest[key] = row
    return list(slowest.values())


def ring_bandwidth(rows: Sequence[GroupTimes]) -> float:
    """Median bandwidth of a rank in the rings of the largest size, 10^9 bytes a second."""
    rings = [row for row in rows if row.operation in RINGS] or list(rows)
    largest = max(row.size_bytes for row in rings)
    return median(row.device_gb_s for row in rings if row.size_bytes > largest / 2)


def step_latency(rows: Sequence[GroupTimes]) -> float:
    """Median time of a step of the smallest operations."""
    smallest = min(row.size_bytes for row in rows)
    small = [row for row in rows if row.size_bytes < 2 * smallest]
    return median(row.median_s / num_steps(row) for row in small)


def num_steps(row: GroupTimes) -> int:
    """Steps of a ring."""
    if row.operation == "send_recv":
        return 1
    steps = len(row.ranks) - 1
    return 2 * steps if row.operation == "all_reduce" else steps


def machine_memory_bytes() -> int:
    """Memory of this machine."""
    return int(psutil.virtual_memory().total)


def processor_name() -> str:
    """The processor's name as Linux gives it; "CPU" elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    name = lines[0].partition(":")[2].strip() if lines else "CPU"
    return f"{name}, {os.cpu_count()} cores"
