"""Measured times as text in 80 columns, as JSON fields, and as panels of a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from weft.errors import counted
from weft.planner.bench.bandwidth import GroupTimes
from weft.planner.bench.communication import CommReport, MeasuredAxis
from weft.planner.bench.computation import ComputeTimes, WorkKind
from weft.planner.bench.figures import MeasuredFigures, slowest_groups
from weft.view.log_plot import Panel, Series
from weft.view.quantity import memory, short_time

HEADINGS: dict[WorkKind, str] = {
    "gemm": "matrix products, rows x columns x inner",
    "attention": "causal attention, batch x heads x tokens x head size",
    "memory": "memory",
    "launch": "launches",
}
UNITS = {
    "memory_gb": "GB",
    "hbm_tb_s": "TB/s",
    "link_gb_s": "GB/s",
    "network_gb_s": "GB/s",
}


COMM_COLUMNS = (
    f"{'operation':<15}{'size':>9}{'times':>7}{'shortest':>11}{'median':>10}"
    f"{'algbw':>10}{'busbw':>10}"
)


class CommTable:
    """Lines of a table that is printed while it is measured: a heading for each axis, then the slowest
    group of each operation and size.
    """

    def __init__(self, print_line: Callable[[str], object]) -> None:
        self._print = print_line
        self._axis = ""

    def add(self, axis: MeasuredAxis, rows: Sequence[GroupTimes]) -> None:
        """Print the lines of one operation and size."""
        if axis.name != self._axis:
            if self._axis:
                self._print("")
            self._print(axis_title(axis.name, rows))
            self._print(COMM_COLUMNS)
            self._axis = axis.name
        for row in slowest_groups(rows):
            self._print(_comm_line(row))


def comm_footer(report: CommReport) -> str:
    """Units, and what was checked."""
    checked = f"{report.num_checked:,} elements checked, all right"
    return f"algbw and busbw in GB/s, of the median; {checked}"


def _comm_line(row: GroupTimes) -> str:
    return (
        f"{row.operation:<15}{memory(row.size_bytes):>9}{row.iterations:>7}"
        f"{short_time(row.min_s):>11}{short_time(row.median_s):>10}"
        f"{row.algorithm_gb_s:>10.3f}{row.bus_gb_s:>10.3f}"
    )


def _by_axis(rows: Sequence[GroupTimes]) -> list[tuple[str, list[GroupTimes]]]:
    grouped = groupby(rows, key=lambda row: row.axis)
    return [(axis, list(rows_of_axis)) for axis, rows_of_axis in grouped]


def axis_title(axis: str, rows: Sequence[GroupTimes]) -> str:
    """`dp: 2 groups of 2 ranks, inside a node`."""
    groups = {row.ranks for row in rows}
    members = len(rows[0].ranks)
    text = f"{axis}: {counted(len(groups), 'group')} of {counted(members, 'rank')}"
    nodes = sorted({row.num_nodes for row in rows})
    if nodes == [1]:
        return f"{text}, inside a node"
    if len(nodes) == 1:
        return f"{text}, each on {nodes[0]} nodes"
    return f"{text}, on {nodes[0]} to {nodes[-1]} nodes"


def comm_panels(report: CommReport) -> list[Panel]:
    """A panel for each axis, a line for each operation: bus bandwidth by size."""
    panels = []
    for axis, rows in _by_axis(report.rows):
        slowest = slowest_groups(rows)
        series = []
        for name in dict.fromkeys(row.operation for row in slowest):
            points = [(row.size_bytes, row.bus_gb_s) for row in slowest if row.operation == name]
            series.append(Series(name, tuple(points)))
        panels.append(Panel(axis_title(axis, rows), tuple(series)))
    return panels


def comm_json(report: CommReport) -> dict[str, Any]:
    """Every group's times and bandwidths."""
    rows = []
    for row in report.rows:
        derived = {
            "placement": row.placement,
            "algorithm_gb_s": row.algorithm_gb_s,
            "bus_gb_s": row.bus_gb_s,
        }
        rows.append({**asdict(row), **derived})
    return {"nodes": report.nodes, "elements_checked": report.num_checked, "rows": rows}


def compute_lines(times: Sequence[ComputeTimes]) -> Iterator[str]:
    """A table for each kind of work."""
    for kind, rows in groupby(times, key=lambda row: row.work.kind):
        yield f"{HEADINGS[kind]:<57}{'shortest':>11}{'median':>12}"
        for row in rows:
            yield _compute_line(row)
        yield ""


def _compute_line(row: ComputeTimes) -> str:
    work = row.work
    rate = ""
    if work.flops:
        rate = f"{row.tflops:.4g} TFLOP/s"
    elif work.num_bytes:
        rate = f"{row.tb_s * 1e3:.4g} GB/s"
    return (
        f"{work.dtype:<10}{work.name:<29}{rate:>18}{_time(row.min_s):>11}{_time(row.median_s):>12}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us" if seconds < 1e-5 else short_time(seconds)


def compute_json(times: Sequence[ComputeTimes]) -> dict[str, Any]:
    """Every piece of work with its times and rates."""
    rows = []
    for row in times:
        found = {"min_s": row.min_s, "median_s": row.median_s}
        rows.append({**asdict(row.work), **found, "tflops": row.tflops, "tb_s": row.tb_s})
    return {"rows": rows}


def figure_lines(measured: MeasuredFigures) -> Iterator[str]:
    """What the measurement says of the device."""
    yield f"{measured.label}; {counted(measured.node, 'rank')} a node"
    for name, value in measured.figures.items():
        yield f"  {name:<16}{value:>10.4g} {UNITS.get(name, 'TFLOP/s')}"
    for name, share in measured.shares.items():
        yield f"  {name:<16}{share.value:>10.1%} of {share.figure}"
    for name, seconds in measured.costs.items():
        yield f"  {name:<16}{seconds * 1e6:>10.4g} us"


def with_origin(
    fields: Mapping[str, Any],
    *,
    day: str,
    versions: str,
    device: str,
) -> dict[str, Any]:
    """JSON fields with the date, the versions and the device of the measurement."""
    return {"date": day, "versions": versions, "device": device, **fields}
