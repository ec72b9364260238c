"""Figures of a device from measured times, as a hardware file holds them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from weft.config.hardware import GB, PEAK_FIELDS, DeviceType
from weft.core.machine_memory import total_bytes
from weft_plan.bench.bandwidth import RINGS, GroupTimes, Placement
from weft_plan.bench.computation import TF32, ComputeTimes, WorkKind

PEAKS = {**PEAK_FIELDS, TF32: "tf32_tflops"}
TERA = 1e12
MAIN_DTYPES: Mapping[DeviceType, str] = {"cpu": "float32", "cuda": "bfloat16"}
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
        device: its type in torch.
        node: ranks of a node.
        figures: name in the hardware file -> value.
        shares: field of `Efficiency` -> share of one of the figures.
        costs: field of `Efficiency` -> seconds.
    """

    program: str
    label: str
    device: DeviceType
    node: int
    figures: Mapping[str, float]
    shares: Mapping[str, ReachedShare] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)


def compute_figures(
    times: Sequence[ComputeTimes], *, device: DeviceType, label: str, node: int, memory_bytes: float
) -> MeasuredFigures:
    """Peaks are the best measured; shares are medians of the shapes."""
    figures = {"memory_gb": memory_bytes / GB}
    for dtype, name in PEAKS.items():
        rates = [row.tflops for row in of_kind(times, "gemm", dtype)]
        if rates:
            figures[name] = max(rates)
    bandwidths = [row.tb_s for row in of_kind(times, "memory")]
    best_bandwidth = max(bandwidths)
    figures["hbm_tb_s"] = best_bandwidth
    shares = {"memory": ReachedShare("hbm_tb_s", median(bandwidths) / best_bandwidth)}
    launch_s = of_kind(times, "launch")[0].median_s
    main = MAIN_DTYPES[device]
    peak = PEAKS[main]
    kinds: tuple[WorkKind, ...] = ("gemm", "attention")
    for kind in kinds:
        rows = of_kind(times, kind, main)
        reached = [arithmetic_share(row, figures, peak, launch_s) for row in rows]
        shares[kind] = ReachedShare(peak, median(reached))
    return MeasuredFigures(
        program="weft bench compute",
        label=label,
        device=device,
        node=node,
        figures=figures,
        shares=shares,
        costs={"launch_s": of_kind(times, "step")[0].median_s},
    )


def of_kind(
    times: Sequence[ComputeTimes], kind: WorkKind, dtype: str | None = None
) -> list[ComputeTimes]:
    """The times of one kind of work, of one type or of all."""
    found = []
    for row in times:
        has_type = dtype is None or row.work.dtype == dtype
        if row.work.kind == kind and has_type:
            found.append(row)
    return found


def arithmetic_share(
    row: ComputeTimes, figures: Mapping[str, float], peak: str, launch_s: float
) -> float:
    """ReachedShare of the peak that the arithmetic reaches, in the time that launch and memory leave; at
    least half of the time is arithmetic's, as small operands stay in caches.
    """
    bytes_a_second = figures["hbm_tb_s"] * TERA
    memory_s = row.work.num_bytes / bytes_a_second
    left_s = row.median_s - launch_s - memory_s
    arithmetic_s = max(left_s, row.median_s / 2)
    flops_a_second = row.work.flops / arithmetic_s
    return flops_a_second / (figures[peak] * TERA)


def comm_figures(
    rows: Sequence[GroupTimes], *, device: DeviceType, label: str, node: int
) -> MeasuredFigures:
    """The bandwidth of a rank inside and between nodes is that of the best operation of the largest
    size (small ones pass through buffers at any rate); the share is what rings of that size reach,
    the latency what a step of a ring takes with the smallest.
    """
    figures: dict[str, float] = {}
    shares: dict[str, ReachedShare] = {}
    costs: dict[str, float] = {}
    for placement, name in BANDWIDTHS.items():
        slowest = slowest_groups(rows_on_links(rows, placement))
        if not slowest:
            continue
        figure = f"{name}_gb_s"
        best_gb_s = max(row.device_gb_s(device) for row in largest_of(slowest))
        figures[figure] = best_gb_s
        shares[name] = ReachedShare(figure, ring_bandwidth(slowest, device) / best_gb_s)
        latency = "latency_s" if placement == "inside" else "network_latency_s"
        costs[latency] = step_latency(slowest)
    return MeasuredFigures(
        program="weft bench comm",
        label=label,
        device=device,
        node=node,
        figures=figures,
        shares=shares,
        costs=costs,
    )


def rows_on_links(rows: Iterable[GroupTimes], placement: Placement) -> Iterator[GroupTimes]:
    """Operations of one placement in which every rank sends."""
    for row in rows:
        uses_every_link = row.operation in RINGS or row.operation == "send_recv"
        if uses_every_link and row.placement == placement:
            yield row


def slowest_groups(rows: Iterable[GroupTimes]) -> list[GroupTimes]:
    """Of groups that did the same at the same time, the slowest."""
    slowest: dict[object, GroupTimes] = {}
    for row in rows:
        key = (row.axis, row.operation, row.size_bytes, row.placement)
        other = slowest.setdefault(key, row)
        if row.median_s > other.median_s:
            slowest[key] = row
    return list(slowest.values())


def ring_bandwidth(rows: Sequence[GroupTimes], device: DeviceType) -> float:
    """Median bandwidth of a rank in the rings of the largest size, 10^9 bytes a second."""
    rings = [row for row in rows if row.operation in RINGS]
    return median(row.device_gb_s(device) for row in largest_of(rings or rows))


def largest_of(rows: Sequence[GroupTimes]) -> list[GroupTimes]:
    """Those of the largest size, which operations round up to whole pieces."""
    largest = max(row.size_bytes for row in rows)
    return [row for row in rows if row.size_bytes > largest / 2]


def step_latency(rows: Sequence[GroupTimes]) -> float:
    """Median time of a step of the smallest operations."""
    smallest = min(row.size_bytes for row in rows)
    latencies = []
    for row in rows:
        is_smallest = row.size_bytes < 2 * smallest
        if is_smallest:
            latencies.append(row.median_s / num_steps(row))
    return median(latencies)


def num_steps(row: GroupTimes) -> int:
    """Steps of a ring."""
    if row.operation == "send_recv":
        return 1
    steps = len(row.ranks) - 1
    if row.operation == "all_reduce":
        return 2 * steps
    return steps


def machine_memory_bytes() -> int:
    """Memory of this machine."""
    return total_bytes()


def processor_name() -> str:
    """The processor's name as Linux gives it; "CPU" elsewhere."""
    name = "CPU"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        lines = []
    if lines:
        _, _, value = lines[0].partition(":")
        name = value.strip()
    return f"{name}, {os.cpu_count()} cores"
