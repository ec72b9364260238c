"""Placement of ranks on nodes: which node each rank is on, and the orders of a mesh's axes that place groups differently."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.core.dimension import dimensions, local_update_axes
from weft.core.mesh import Mesh


@dataclass(frozen=True)
class NodePlacement:
    """The node of every rank, by a number.

    >>> NodePlacement.by_node((2, 1)).node_of, NodePlacement.in_turn((3, 2)).node_of
    ((0, 0, 1), (0, 1, 0, 1, 0))
    """

    node_of: tuple[int, ...]

    @staticmethod
    def even(num_ranks: int, ranks_per_node: int) -> NodePlacement:
        """Nodes with so many ranks each; the last one with what is left."""
        return NodePlacement(tuple(rank // ranks_per_node for rank in range(num_ranks)))

    @staticmethod
    def by_node(counts: Sequence[int]) -> NodePlacement:
        """Nodes with these numbers of ranks, filled one after the other."""
        return NodePlacement(tuple(node for node, count in enumerate(counts) for _ in range(count)))

    @staticmethod
    def in_turn(counts: Sequence[int], *, block: int = 1) -> NodePlacement:
        """Nodes with these numbers of ranks, which take `block` ranks at a time while they have room:
        Slurm's distributions `cyclic` and `plane`.
        """
        left = list(counts)
        node_of: list[int] = []
        while any(left):
            for node, room in enumerate(left):
                taken = min(block, room)
                node_of.extend([node] * taken)
                left[node] -= taken
        return NodePlacement(tuple(node_of))

    @property
    def counts(self) -> tuple[int, ...]:
        """Ranks of every node."""
        return tuple(map(self.node_of.count, sorted(set(self.node_of))))

    @property
    def filled_in_order(self) -> NodePlacement:
        """As many ranks on each node, one node after the other."""
        return NodePlacement.by_node(self.counts)

    def num_nodes(self, ranks: Iterable[int]) -> int:
        """How many nodes these ranks are on."""
        return len({self.node_of[rank] for rank in ranks})

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on the same node."""
        return len(set(self.node_of)) < 2

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks of a node."""
        return tuple(rank for rank, other in enumerate(self.node_of) if other == node)

    def most_nodes(self, mesh: Mesh, axes: Collection[str]) -> int:
        """How many nodes a group along these axes is on, at most."""
        return max(self.num_nodes(group) for group in mesh.iter_groups(tuple(axes)))


def orders(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with its axes in every order, the usual order first; those of local updates stay
    outermost.
    """
    wide = sorted(
        ((axis, degree) for axis, degree in mesh.axes if degree > 1),
        key=lambda item: dimensions()[item[0]].nesting,
    )
    outermost = [item for item in wide if item[0] in local_update_axes()]
    others = [item for item in wide if item not in outermost]
    for order in itertools.permutations(others):
        yield Mesh((*outermost, *order))


def goes_by_node(device: str, members: int, num_nodes: int) -> bool:
    """Whether collectives of so many members go in memory within nodes, then between them; see Note
    [Time of work] in `weft.planner.simulate.speeds`.
    """
    return device == "cpu" and members > num_nodes > 1 and members % num_nodes == 0
