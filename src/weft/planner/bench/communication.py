"""Times of all collectives on the ranks of a mesh, by axis and by placement inside and between nodes."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.text import all_gather_text
from weft.core.mesh import Mesh
from weft.planner.bench.bandwidth import GroupTimes, OperationName
from weft.planner.bench.clock import Times, num_iterations, timed
from weft.planner.bench.operations import KnownOperation, known_operation

NODES, RANKS_OF_A_NODE = "nodes", "ranks of a node"
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
    """An axis whose groups communicate at the same time, as in training."""

    name: str
    comm: Comm

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        return self.comm.mesh.groups(self.name)


def node_name(env: Mapping[str, str]) -> str:
    """The host of this process, and the number of its node where the launcher numbers nodes."""
    numbers = [env[name] for name in NODE_VARIABLES if env.get(name)]
    return " ".join([socket.gethostname(), *numbers[:1]])


def measure_communication(comm: Comm, workload: Workload) -> CommReport:
    """Time all operations over all axes; every rank must call it.

    Raises:
        CommError: a result is wrong.
    """
    nodes = all_gather_text(comm, node_name(os.environ))
    rows: list[GroupTimes] = []
    num_checked = 0
    for axis in measured_axes(comm, nodes):
        for name in workload.operations:
            for size in workload.sizes:
                operation = known_operation(name, axis.comm, axis.name, size)
                num_checked += operation.check(axis.comm, axis.name)
                times = _times_of_all_ranks(axis.comm, operation, workload.budget_s)
                num_checked += operation.check(axis.comm, axis.name)
                rows.extend(_rows(axis, operation, times, nodes))
    total = comm.sum_world(torch.tensor([float(num_checked)], device=comm.device))
    return CommReport(nodes, tuple(rows), int(total))


def measured_axes(comm: Comm, nodes: Sequence[str]) -> Iterator[MeasuredAxis]:
    """The axes of the mesh with more than one rank. On several nodes also the ranks of each node,
    and the ranks with the same place in every node, unless these are the groups of an axis.
    """
    seen = set()
    for axis in comm.mesh.wide_axes:
        seen.add(comm.mesh.groups(axis))
        yield MeasuredAxis(axis, comm)
    grid = node_mesh(nodes)
    if grid is None:
        return
    by_node = Comm(grid, comm.rank, comm.transport)
    for axis in grid.wide_axes:
        if grid.groups(axis) not in seen:
            yield MeasuredAxis(axis, by_node)


def node_mesh(nodes: Sequence[str]) -> Mesh | None:
    """The ranks as nodes times ranks of a node; None on one node, and where nodes differ in size or
    their ranks are not consecutive.
    """
    names = list(dict.fromkeys(nodes))
    num_local, rest = divmod(len(nodes), len(names))
    expected = [name for name in names for _ in range(num_local)]
    if len(names) == 1 or rest or expected != list(nodes):
        return None
    return Mesh(((NODES, len(names)), (RANKS_OF_A_NODE, num_local)))


def _times_of_all_ranks(comm: Comm, operation: KnownOperation, budget_s: float) -> Tensor:
    """Seconds [world, iterations]; barriers before the iterations, and none between them."""
    with comm.unchecked():
        comm.barrier_world()
        warm = timed(operation.run, 2, comm.device)
        second_s = _row(comm, Times(warm.seconds[1:]))
        slowest_s = comm.combine_world(second_s, lambda rows: rows.amax(0))
        iterations = num_iterations(float(slowest_s), budget_s)
        comm.barrier_world()
        times = timed(operation.run, iterations, comm.device)
        return comm.all_gather_world(_row(comm, times).unsqueeze(0)).cpu()


def _row(comm: Comm, times: Times) -> Tensor:
    return torch.tensor(times.seconds, dtype=torch.float64, device=comm.device)


def _rows(
    axis: MeasuredAxis,
    operation: KnownOperation,
    times: Tensor,
    nodes: Sequence[str],
) -> Iterator[GroupTimes]:
    """One row a group; an iteration takes as long as that of its slowest member."""
    for ranks in axis.groups:
        slowest = times[list(ranks)].amax(0)
        group_times = Times(tuple(slowest.tolist()))
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
