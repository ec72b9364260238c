"""Sizes and bandwidths of collectives as nccl-tests define them: algorithm and bus bandwidth.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md. The size S of an operation is that of the
large tensor: of the whole result of an all-gather, of the whole input of a reduce-scatter. With t
seconds and n ranks:

    algorithm bandwidth  S / t
    bus bandwidth        S / t times a factor that makes it the bandwidth of one rank's link, for
                         every n: 2 (n-1)/n of an all-reduce, (n-1)/n where each rank keeps its own
                         share, 1 where everything leaves one rank
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from weft.config.hardware import GB, DeviceType
from weft.core.node_placement import goes_by_node

OperationName = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "send_recv",
]
OPERATIONS: tuple[OperationName, ...] = get_args(OperationName)
RINGS: tuple[OperationName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Operations in which every rank sends as much as every other: they use all links at once."""
Placement = Literal["inside", "between"]
"""A group inside one node, or of ranks on several nodes."""


def bus_factor(operation: OperationName, num_members: int) -> float:
    """Bus bandwidth as a multiple of algorithm bandwidth."""
    others = (num_members - 1) / num_members
    if operation == "all_reduce":
        return 2 * others
    if operation in ("broadcast", "send_recv"):
        return 1.0
    return others


@dataclass(frozen=True)
class GroupTimes:
    """Times of one operation of one size in one group, the slowest member of each iteration.

    Attributes:
        axis: of the mesh, or "nodes" and "ranks of a node" where these are no axes of it.
        ranks: the members.
        num_nodes: on which they are.
        size_bytes: S.
        iterations: how often it was timed.
    """

    axis: str
    ranks: tuple[int, ...]
    num_nodes: int
    operation: OperationName
    size_bytes: int
    iterations: int
    min_s: float
    median_s: float

    @property
    def placement(self) -> Placement:
        return "inside" if self.num_nodes == 1 else "between"

    @property
    def algorithm_gb_s(self) -> float:
        """10^9 bytes a second, of the median time."""
        return self.size_bytes / self.median_s / GB

    @property
    def bus_gb_s(self) -> float:
        """10^9 bytes a second, of the median time."""
        return self.algorithm_gb_s * bus_factor(self.operation, len(self.ranks))

    def device_gb_s(self, device: DeviceType) -> float:
        """Bandwidth of one member's link. Between nodes a ring uses the network of all members that
        share a node, so each has that part of the bus bandwidth; what goes within nodes first leaves
        them by a smaller part (`weft.planner.simulate.speeds`).
        """
        members = len(self.ranks)
        if self.num_nodes == 1:
            return self.bus_gb_s
        if self.operation != "all_to_all" and goes_by_node(device, members, self.num_nodes):
            return self.bus_gb_s * (self.num_nodes - 1) / (members - 1)
        return self.bus_gb_s / (members / self.num_nodes)


def byte_sizes(smallest: int, largest: int, *, factor: int) -> Iterator[int]:
    """Sizes from `smallest` to `largest`, each `factor` times the one before it."""
    size = smallest
    while size <= largest:
        yield size
        size *= factor
