"""Measured times as text in 80 columns, as JSON fields, and as panels of a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from weft.errors import counted
from weft.view.log_plot import Panel, Series
from weft.view.quantity import memory, short_time
from weft_plan.bench.bandwidth import GroupTimes
from weft_plan.bench.communication import CommReport, MeasuredAxis
from weft_plan.bench.computation import ComputeTimes, WorkKind
from weft_plan.bench.figures import MeasuredFigures, slowest_groups

HEADINGS: dict[WorkKind, str] = {
    "gemm": "matrix products, rows x columns x inner",
    "attention": "causal attention, batch x heads x tokens x head size",
    "memory": "memory",
    "launch": "launches",
    "step": "a launch of a training step: Python, dispatch, autograd",
}
UNITS = {"memory_gb": "GB", "hbm_tb_s": "TB/s", "link_gb_s": "GB/s", "network_gb_s": "GB/s"}


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
            self._begin_axis(axis.name, rows)
        for row in slowest_groups(rows):
            self._print(_comm_line(row))

    def _begin_axis(self, axis: str, rows: Sequence[GroupTimes]) -> None:
        is_first = not self._axis
        if not is_first:
            self._print("")
        self._print(axis_title(axis, rows))
        self._print(COMM_COLUMNS)
        self._axis = axis


def comm_footer(report: CommReport) -> str:
    """Units, and what was checked."""
    checked = f"{report.num_checked:,} elements checked, all right"
    return f"algbw and busbw in GB/s, of the median; {checked}"


def _comm_line(row: GroupTimes) -> str:
    size = memory(row.size_bytes)
    shortest = short_time(row.min_s)
    median = short_time(row.median_s)
    bandwidths = f"{row.algorithm_gb_s:>10.3f}{row.bus_gb_s:>10.3f}"
    return f"{row.operation:<15}{size:>9}{row.iterations:>7}{shortest:>11}{median:>10}{bandwidths}"


def _by_axis(rows: Sequence[GroupTimes]) -> dict[str, list[GroupTimes]]:
    """The rows of each axis."""
    found: dict[str, list[GroupTimes]] = {}
    for row in rows:
        rows_of_axis = found.setdefault(row.axis, [])
        rows_of_axis.append(row)
    return found


def axis_title(axis: str, rows: Sequence[GroupTimes]) -> str:
    """`dp: 2 groups of 2 ranks, inside a node`."""
    num_groups = len({row.ranks for row in rows})
    num_members = len(rows[0].ranks)
    groups = counted(num_groups, "group")
    members = counted(num_members, "rank")
    text = f"{axis}: {groups} of {members}"
    numbers_of_nodes = [row.num_nodes for row in rows]
    fewest = min(numbers_of_nodes)
    most = max(numbers_of_nodes)
    if most == 1:
        return f"{text}, inside a node"
    if fewest == most:
        return f"{text}, each on {most} nodes"
    return f"{text}, on {fewest} to {most} nodes"


def comm_panels(report: CommReport) -> list[Panel]:
    """A panel for each axis, a line for each operation: bus bandwidth by size."""
    panels = []
    for axis, rows in _by_axis(report.rows).items():
        points: dict[str, list[tuple[float, float]]] = {}
        for row in slowest_groups(rows):
            of_operation = points.setdefault(row.operation, [])
            of_operation.append((row.size_bytes, row.bus_gb_s))
        series = []
        for name, of_operation in points.items():
            series.append(Series(name, tuple(of_operation)))
        title = axis_title(axis, rows)
        panels.append(Panel(title, tuple(series)))
    return panels


def comm_json(report: CommReport) -> dict[str, Any]:
    """Every group's times and bandwidths."""
    rows = []
    for row in report.rows:
        fields = asdict(row)
        fields["placement"] = row.placement
        fields["algorithm_gb_s"] = row.algorithm_gb_s
        fields["bus_gb_s"] = row.bus_gb_s
        rows.append(fields)
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
        gb_s = row.tb_s * 1e3
        rate = f"{gb_s:.4g} GB/s"
    shortest = _time(row.min_s)
    median = _time(row.median_s)
    return f"{work.dtype:<10}{work.name:<29}{rate:>18}{shortest:>11}{median:>12}"


def _time(seconds: float) -> str:
    if seconds >= 1e-5:
        return short_time(seconds)
    microseconds = seconds * 1e6
    return f"{microseconds:.2f} us"


def compute_json(times: Sequence[ComputeTimes]) -> dict[str, Any]:
    """Every piece of work with its times and rates."""
    rows = []
    for row in times:
        fields = asdict(row.work)
        fields["min_s"] = row.min_s
        fields["median_s"] = row.median_s
        fields["tflops"] = row.tflops
        fields["tb_s"] = row.tb_s
        rows.append(fields)
    return {"rows": rows}


def figure_lines(measured: MeasuredFigures) -> Iterator[str]:
    """What the measurement says of the device."""
    ranks = counted(measured.node, "rank")
    yield f"{measured.label}; {ranks} a node"
    for name, value in measured.figures.items():
        unit = UNITS.get(name, "TFLOP/s")
        yield f"  {name:<16}{value:>10.4g} {unit}"
    for name, share in measured.shares.items():
        yield f"  {name:<16}{share.value:>10.1%} of {share.figure}"
    for name, seconds in measured.costs.items():
        microseconds = seconds * 1e6
        yield f"  {name:<16}{microseconds:>10.4g} us"


def with_origin(
    fields: Mapping[str, Any], *, day: str, versions: str, device: str
) -> dict[str, Any]:
    """JSON fields with the date, the versions and the device of the measurement."""
    return {"date": day, "versions": versions, "device": device, **fields}
