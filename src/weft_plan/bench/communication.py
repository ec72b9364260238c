"""Times of all collectives on the ranks of a mesh, by axis and by placement inside and between nodes."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.text import all_gather_text
from weft.core.mesh import Mesh
from weft.parallel.dp import AXIS as DP
from weft.parallel.tp import AXIS as TP
from weft_plan.bench.bandwidth import GroupTimes, OperationName
from weft_plan.bench.clock import Times, num_iterations, timed
from weft_plan.bench.operations import KnownOperation, known_operation

OUTER, INNER = DP, TP
"""Axes that stand for the nodes, and for the ranks of a node."""
PLACEMENTS = {OUTER: "nodes", INNER: "ranks of a node"}
NODE_VARIABLES = ("GROUP_RANK", "SLURM_NODEID")
"""Number of the node in the variables of torchrun and of Slurm."""


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        sizes: S in bytes.
        budget_s: time of one operation of one size.
    """

    operations: tuple[OperationName, ...]
    sizes: tuple[int, ...]
    budget_s: float


@dataclass(frozen=True)
class CommReport:
    """Measured times, equal on every rank.

    Attributes:
        nodes: of every rank, by name.
        num_checked: elements of results that were compared, of all ranks.
    """

    nodes: tuple[str, ...]
    rows: tuple[GroupTimes, ...]
    num_checked: int

    @property
    def num_nodes(self) -> int:
        return len(set(self.nodes))


@dataclass(frozen=True)
class MeasuredAxis:
    """An axis whose groups communicate at the same time, as in training.

    Attributes:
        name: what it is called in reports.
        axis: of the mesh of `comm`.
    """

    name: str
    comm: Comm
    axis: str

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """World ranks of every group."""
        return self.comm.mesh.groups(self.axis)


def node_name(env: Mapping[str, str]) -> str:
    """The host of this process, and the number of its node where the launcher numbers nodes."""
    host = socket.gethostname()
    for name in NODE_VARIABLES:
        number = env.get(name)
        if number:
            return f"{host} {number}"
    return host


def ignore_rows(axis: MeasuredAxis, rows: Sequence[GroupTimes]) -> None:
    """Do nothing."""


def measure_communication(
    comm: Comm,
    workload: Workload,
    *,
    on_rows: Callable[[MeasuredAxis, Sequence[GroupTimes]], None] = ignore_rows,
) -> CommReport:
    """Time all operations over all axes; every rank must call it.

    Args:
        on_rows: called on every rank with the times of all groups, once for each axis, operation
            and size.

    Raises:
        CommError: a result is wrong.
    """
    nodes = all_gather_text(comm, node_name(os.environ))
    rows: list[GroupTimes] = []
    num_checked = 0
    for axis in measured_axes(comm, nodes):
        for name, size in itertools.product(workload.operations, workload.sizes):
            operation = known_operation(name, axis.comm, axis.axis, size)
            timing = _time_operation(axis, operation, workload.budget_s)
            num_checked += timing.num_checked
            found = tuple(_rows(axis, operation, timing.seconds, nodes))
            on_rows(axis, found)
            rows.extend(found)
    total = comm.sum_world(torch.tensor([float(num_checked)], device=comm.device))
    return CommReport(nodes, tuple(rows), int(total))


def measured_axes(comm: Comm, nodes: Sequence[str]) -> Iterator[MeasuredAxis]:
    """The axes of the mesh with more than one rank. On several nodes also the ranks of each node,
    and the ranks with the same place in every node, unless these are the groups of an axis.
    """
    seen = set()
    for axis in comm.mesh.wide_axes:
        seen.add(comm.mesh.groups(axis))
        yield MeasuredAxis(axis, comm, axis)
    grid = node_mesh(nodes)
    if grid is None:
        return
    by_node = Comm(grid, comm.rank, comm.transport)
    for axis in grid.wide_axes:
        if grid.groups(axis) not in seen:
            yield MeasuredAxis(PLACEMENTS[axis], by_node, axis)


def node_mesh(nodes: Sequence[str]) -> Mesh | None:
    """The ranks as nodes times ranks of a node; None on one node, and where nodes differ in size or
    their ranks are not consecutive.
    """
    num_nodes = len(set(nodes))
    num_local = len(nodes) // num_nodes
    mesh = Mesh(((OUTER, num_nodes), (INNER, num_local)))
    if num_nodes == 1 or mesh.size != len(nodes):
        return None
    for ranks in mesh.groups(INNER):
        if len({nodes[rank] for rank in ranks}) > 1:
            return None
    return mesh


@dataclass(frozen=True)
class _Timing:
    """Seconds [world, iterations], and how many elements of this rank's results were compared."""

    seconds: Tensor
    num_checked: int


def _time_operation(axis: MeasuredAxis, operation: KnownOperation, budget_s: float) -> _Timing:
    """Barriers stand before the iterations, and none between them; the first and the last result are
    checked.
    """
    comm = axis.comm
    num_checked = operation.check(operation.run(), comm, axis.axis)
    results: list[Tensor | None] = [None]

    def run() -> None:
        results[0] = operation.run()

    with comm.unchecked():
        comm.barrier_world()
        own_s = _row(comm, timed(run, 1, comm.device))
        slowest_s = comm.combine_world(own_s, lambda rows: rows.amax(0))
        iterations = num_iterations(float(slowest_s), budget_s)
        comm.barrier_world()
        times = timed(run, iterations, comm.device)
        seconds = comm.all_gather_world(_row(comm, times).unsqueeze(0)).cpu()
    num_checked += operation.check(results[0], comm, axis.axis)
    return _Timing(seconds, num_checked)


def _row(comm: Comm, times: Times) -> Tensor:
    return torch.tensor(times.seconds, dtype=torch.float64, device=comm.device)


def _rows(
    axis: MeasuredAxis, operation: KnownOperation, times: Tensor, nodes: Sequence[str]
) -> Iterator[GroupTimes]:
    """One row a group; an iteration takes as long as that of its slowest member."""
    for ranks in axis.groups:
        of_members = times[list(ranks)]
        slowest = of_members.amax(0).tolist()
        group_times = Times(tuple(slowest))
        yield GroupTimes(
            axis=axis.name,
            ranks=ranks,
            num_nodes=len({nodes[rank] for rank in ranks}),
            operation=operation.name,
            size_bytes=operation.size_bytes,
            iterations=len(group_times.seconds),
            min_s=group_times.min_s,
            median_s=group_times.median_s,
        )
