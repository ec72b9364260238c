"""Costs of the order of a mesh's axes on nodes: predicted steps, nodes of groups, bytes between nodes; the best order.

Note [Order as a placement]
    Another order of the same axes gives the ranks other numbers: each has the same coordinates, the
    same work and the same partners, on another node. So a measured run has the costs of all orders,
    under placements that say where the coordinates of its ranks are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.comm.observe import Operation
from weft.comm.transport import Op
from weft.config.hardware import Hardware
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh, Ranks
from weft.core.node_placement import NodePlacement, goes_by_node, orders
from weft.planner.measure.played_actions import action_keys
from weft.planner.measure.roles import RoleCosts
from weft.planner.measure.step_memory import boundary_bytes
from weft.planner.simulate.placed_steps import Numbers, PlacedSteps, num_distinct
from weft.schedule.lower import Send
from weft.view.quantity import memory, short_time

CLEARLY_WORSE = 1.05
"""Predicted time of a step, as a multiple of that of the best order, from which a note is made."""
EQUAL = 1.01
"""Multiple of the least time up to which an order that comes earlier in `orders` is taken."""


@dataclass(frozen=True)
class OrderCosts:
    """A step under one order of the axes.

    Attributes:
        step_s: predicted seconds.
        nodes: axis, or several joined by "+" -> the nodes that a group is on, at most.
        crossing_bytes: of these, what all ranks send to other nodes in a step.
    """

    mesh: str
    step_s: float
    nodes: Mapping[str, int]
    crossing_bytes: Mapping[str, int]


@dataclass(frozen=True)
class MeshOrder:
    """The given order of a mesh's axes beside the best one, where ranks are placed so.

    Attributes:
        filled_s: predicted seconds of the given order, were nodes filled one after the other.
    """

    given: OrderCosts
    best: OrderCosts
    filled_s: float

    @property
    def factor(self) -> float:
        """Predicted time of the given order, as a multiple of that of the best one."""
        return self.given.step_s / self.best.step_s

    @property
    def note(self) -> str:
        """What a worse order costs, and why; "" where it is not clearly worse."""
        if self.factor < CLEARLY_WORSE:
            return ""
        axis = max(self.given.nodes, key=self._saved_bytes)
        nodes = self.best.nodes[axis]
        better = "keeps it inside" if nodes == 1 else f"has it on {nodes}"
        given_s, best_s = short_time(self.given.step_s), short_time(self.best.step_s)
        return (
            f"mesh order: a step takes {self.factor:.3g} times as long (predicted {given_s}, not "
            f"{best_s}): {self._with_degrees(axis)} is on {self.given.nodes[axis]} nodes and sends "
            f"{memory(self.given.crossing_bytes[axis])} a step between them; "
            f'--mesh "{self.best.mesh}" {better}{self._other_fix}'
        )

    @property
    def _other_fix(self) -> str:
        """The placement under which the given order is as good."""
        if self.filled_s > EQUAL * self.best.step_s:
            return ""
        return ", and so does this order where ranks fill one node after the other"

    def _saved_bytes(self, axis: str) -> int:
        return self.given.crossing_bytes[axis] - self.best.crossing_bytes[axis]

    def _with_degrees(self, axis: str) -> str:
        mesh = Mesh.parse(self.given.mesh)
        return "+".join(f"{name}{mesh.degree(name)}" for name in axis.split("+"))

    def to_dict(self) -> dict[str, Any]:
        """Both orders, for JSON."""
        return {"given": asdict(self.given), "best": asdict(self.best), "note": self.note}


def mesh_order(
    roles: Sequence[RoleCosts], hardware: Hardware, placement: NodePlacement
) -> MeshOrder | None:
    """The order of the axes of a measured run beside the best one; None where all ranks are on one
    node, or the speed of a link that they need is not known.
    """
    if placement.is_one_node or not has_links(hardware, placement):
        return None
    steps = PlacedSteps(roles, hardware)
    placements = {order: placed(placement, steps.mesh, order) for order in orders(steps.mesh)}
    seconds = {order: steps.slowest(nodes).total_s for order, nodes in placements.items()}
    least_s = min(seconds.values())
    best = next(order for order in seconds if seconds[order] <= EQUAL * least_s)
    given = _costs(steps, roles, steps.mesh, placement)
    is_best = given.step_s <= seconds[best]
    return MeshOrder(
        given=given,
        best=given if is_best else _costs(steps, roles, best, placements[best]),
        filled_s=steps.slowest(placement.filled_in_order).total_s,
    )


def has_links(hardware: Hardware, placement: NodePlacement) -> bool:
    """Whether the speeds of the links are known that ranks with this placement have."""
    has_network = placement.is_one_node or hardware.network_gb_s > 0
    return has_network and (max(placement.counts) == 1 or hardware.link_gb_s > 0)


def placed(placement: NodePlacement, mesh: Mesh, order: Mesh) -> NodePlacement:
    """The nodes of the coordinates of a mesh's ranks, where the order of axes is another; see Note
    [Order as a placement].
    """
    grid = np.reshape(placement.node_of, [degree for _, degree in order.axes])
    places = [order.wide_axes.index(axis) for axis in mesh.wide_axes]
    return NodePlacement(tuple(grid.transpose(places).ravel().tolist()))


def _costs(
    steps: PlacedSteps, roles: Sequence[RoleCosts], order: Mesh, placement: NodePlacement
) -> OrderCosts:
    """The costs of an order, whose coordinates are placed so."""
    nodes = np.array(placement.node_of)
    most: Counter[str] = Counter()
    crossing: Counter[str] = Counter()
    for role in roles:
        for (axis, op, group), sent_bytes in _sent_bytes(steps, role).items():
            along = nodes[steps.in_all_lanes(group)]
            most[axis] = max(most[axis], int(num_distinct(along).max()))
            share = float(crossing_shares(op, along, steps.hardware).mean())
            crossing[axis] += round(role.num_ranks * share * sent_bytes)
    step_s = steps.slowest(placement).total_s
    return OrderCosts(order.text, step_s, dict(most), dict(crossing))


def _sent_bytes(steps: PlacedSteps, role: RoleCosts) -> Counter[tuple[str, Op, Ranks]]:
    """What the first rank of a role sends along axes of the mesh, by operation and its ranks: without
    the few numbers that all ranks of the world exchange.
    """
    plan = role.step.plan
    axes = {axis for axis, _ in plan.mesh.axes}
    sent: Counter[tuple[str, Op, Ranks]] = Counter()
    for op, times in _operations(role):
        if axes.issuperset(op.axis.split("+")) and op.op != "recv":
            sent[op.axis, op.op, steps.at_row(op.group, role)] += times * op.sent_bytes
    pipeline = pipeline_axis()
    for instruction in plan.program.rows[role.row]:
        if isinstance(instruction, Send):
            rows = (role.row, instruction.peer)
            pair = tuple(plan.mesh.rank(**{pipeline: row}) for row in rows)
            sent[pipeline, "send", pair] += boundary_bytes(plan, instruction)
    return sent


def _operations(role: RoleCosts) -> Iterator[tuple[Operation, int]]:
    """The operations of a rank in a step, and how often each is done."""
    for key, times in Counter(action_keys(role.step.plan.table, role.row).values()).items():
        for op in role.step.actions[key].operations:
            yield op, times
    for region in role.step.phases.values():
        for op in region.operations:
            yield op, 1


def crossing_shares(op: Op, nodes: Numbers, hardware: Hardware) -> NDArray[np.float64]:
    """Of what a rank sends, the share that goes to another node: of a ring once for each node, on
    average over its members, of an all-to-all what is for members elsewhere. See Note [Time of
    work] in `speeds` for collectives that go by node.

    Args:
        nodes: of the members of a group, the sender first, a row for each lane.
    """
    num_members = nodes.shape[1]
    num_nodes = num_distinct(nodes)
    if op == "send":
        return (num_nodes > 1).astype(np.float64)
    if op == "all_to_all":
        num_elsewhere = np.count_nonzero(nodes != nodes[:, :1], axis=1)
        elsewhere: NDArray[np.float64] = num_elsewhere / max(1, num_members - 1)
        return elsewhere
    by_node = [goes_by_node(hardware.device, num_members, int(number)) for number in num_nodes]
    ring = np.where(num_nodes > 1, num_nodes, 0) / num_members
    shares: NDArray[np.float64] = np.where(by_node, (num_nodes - 1) / max(1, num_members - 1), ring)
    return shares
