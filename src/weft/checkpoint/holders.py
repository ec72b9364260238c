"""Which rank holds the second copy of a rank's snapshot: one on another node, a shift along a mesh axis away. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.core.mesh import Axis, Mesh


@dataclass(frozen=True)
class HolderShift:
    """The copy of every rank is held `shift` places on along `axis`, around its end."""

    axis: Axis
    shift: int


def choose_holders(mesh: Mesh, nodes: Sequence[str]) -> HolderShift | None:
    """The shift with which the holder of every rank is on another node: along one axis, the
    outermost first, else along all of them; the shortest shift first. None if there is none.

    Args:
        nodes: name of the node of every rank, in rank order.
    """
    for candidate in _candidates(mesh):
        if _leaves_every_node(candidate, mesh, nodes):
            return candidate
    return None


def _candidates(mesh: Mesh) -> Iterator[HolderShift]:
    axes: list[Axis] = [*mesh.wide_axes]
    if len(axes) > 1:
        axes.append(mesh.wide_axes)
    for axis in axes:
        for shift in range(1, mesh.degree(axis)):
            yield HolderShift(axis, shift)


def _leaves_every_node(candidate: HolderShift, mesh: Mesh, nodes: Sequence[str]) -> bool:
    for group in mesh.iter_groups(candidate.axis):
        for place, rank in enumerate(group):
            holder = group[(place + candidate.shift) % len(group)]
            if nodes[holder] == nodes[rank]:
                return False
    return True
