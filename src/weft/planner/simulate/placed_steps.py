"""Predicted step of a measured run where its ranks are placed on nodes in any way: that of the slowest ranks.

Note [Slowest lane]
    One rank of each pipeline coordinate is measured, and nodes may divide the groups of others
    differently: where ranks send to the next one (ring attention: one of them in another node),
    where nodes do not have equally many ranks, or take ranks in turn. A lane are the ranks that
    differ along the pipeline axis alone. All lanes wait for each other, so a step takes as long as
    that of its slowest lane. Lanes whose groups are on equally many nodes are alike: one of them is
    simulated, and of most runs that is the one which was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.config.hardware import Hardware
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Ranks
from weft.core.node_placement import NodePlacement
from weft.planner.measure.roles import RoleCosts
from weft.planner.simulate.pipeline_time import pipeline_order
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import StepTime, step_time
from weft.schedule.lower import Send

Numbers = NDArray[np.int64]

MOST_MEMBERS = 2**22
"""Members of the groups of all lanes that are looked at; of more, the lanes at the first and last places."""


def on_slowest_lane(roles: Sequence[RoleCosts], speeds: Speeds) -> Speeds:
    """The speeds that ranks of the slowest lane have of a measured run; see Note [Slowest lane]."""
    num_ranks = roles[0].step.plan.mesh.size
    placement = speeds.placement or NodePlacement.even(num_ranks, speeds.hardware.node)
    if placement.is_one_node:
        return speeds
    return replace(speeds, placement=PlacedSteps(roles, speeds.hardware).slowest(placement).nodes)


class LaneStep(NamedTuple):
    """The step of a lane, and the nodes of its ranks, as if they were those that were measured."""

    step: StepTime
    nodes: NodePlacement

    @property
    def total_s(self) -> float:
        """Predicted seconds of the step."""
        return self.step.total_s


class PlacedSteps:
    """The step of a measured run on any placement of its ranks.

    Attributes:
        mesh: of the run.
        hardware: that it is priced for.
    """

    def __init__(self, roles: Sequence[RoleCosts], hardware: Hardware) -> None:
        plan = roles[0].step.plan
        self.mesh = plan.mesh
        self.hardware = hardware
        self._roles = roles
        self._order = pipeline_order(plan.table)
        self._degrees = tuple(degree for _, degree in self.mesh.axes)
        every_rank = np.arange(self.mesh.size)
        self._coords = np.stack(np.unravel_index(every_rank, self._degrees), axis=1)
        groups = tuple(dict.fromkeys(_groups(roles)))
        self._lanes = self._lanes_of(sum(map(len, groups)))
        self._members = [self.in_all_lanes(group) for group in groups]
        self._steps: dict[bytes, LaneStep] = {}

    def _lanes_of(self, num_members: int) -> Numbers:
        """Coordinates of the ranks at the first pipeline coordinate; see `MOST_MEMBERS`."""
        axes = [axis for axis, _ in self.mesh.axes]
        is_lane = np.ones(self.mesh.size, dtype=bool)
        if pipeline_axis() in axes:
            is_lane = self._coords[:, axes.index(pipeline_axis())] == 0
        if is_lane.sum() * num_members > MOST_MEMBERS:
            last = np.array(self._degrees) - 1
            is_lane &= np.all((self._coords == 0) | (self._coords == last), axis=1)
        lanes: Numbers = self._coords[is_lane]
        return lanes

    def _moved(self, ranks: Numbers, by: Numbers) -> Numbers:
        """For each row of `by`, the ranks moved by so much along each axis, which goes around."""
        coords = (self._coords[ranks][None] + by[:, None]) % self._degrees
        moved: Numbers = np.ravel_multi_index(tuple(np.moveaxis(coords, -1, 0)), self._degrees)
        return moved

    def at_row(self, group: Ranks, role: RoleCosts) -> Ranks:
        """A group of the rank that was measured, as the first rank of a role has it."""
        first = self.mesh.rank(**{pipeline_axis(): role.row})
        distance = self._coords[first] - self._coords[role.step.rank]
        (moved,) = self._moved(np.array(group), distance[None])
        return tuple(moved.tolist())

    def in_all_lanes(self, group: Ranks) -> Numbers:
        """The group of the first lane, and of each other lane: a row each."""
        return self._moved(np.array(group), self._lanes)

    def slowest(self, placement: NodePlacement) -> LaneStep:
        """The slowest lane; see Note [Slowest lane]."""
        nodes = np.array(placement.node_of)
        columns = [num_distinct(nodes[members]) for members in self._members]
        if not columns:
            return self._step(placement)
        alike, first = np.unique(np.stack(columns, axis=1), axis=0, return_index=True)
        lanes: list[LaneStep] = []
        for counts, lane in zip(alike, first, strict=True):
            key = counts.tobytes()
            if key not in self._steps:
                (moved,) = self._moved(np.arange(self.mesh.size), self._lanes[lane][None])
                self._steps[key] = self._step(NodePlacement(tuple(nodes[moved].tolist())))
            lanes.append(self._steps[key])
        return max(lanes, key=lambda lane: lane.total_s)

    def _step(self, nodes: NodePlacement) -> LaneStep:
        speeds = Speeds(self.hardware, nodes)
        return LaneStep(step_time(self._roles, speeds, order=self._order), nodes)


def _groups(roles: Sequence[RoleCosts]) -> Iterator[Ranks]:
    """The ranks of all recorded operations along axes of the mesh, and of messages between pipeline
    coordinates; without those of the few numbers that all ranks of the world exchange.
    """
    mesh = roles[0].step.plan.mesh
    axes = {axis for axis, _ in mesh.axes}
    for role in roles:
        for region in (*role.step.actions.values(), *role.step.phases.values()):
            for op in region.operations:
                if axes.issuperset(op.axis.split("+")):
                    yield op.group
        for instruction in role.step.plan.program.rows[role.row]:
            if isinstance(instruction, Send):
                yield tuple(
                    mesh.rank(**{pipeline_axis(): row}) for row in (role.row, instruction.peer)
                )


def num_distinct(rows: Numbers) -> Numbers:
    """How many different numbers are in each row."""
    ordered = np.sort(rows, axis=1)
    counts: Numbers = 1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1)
    return counts
