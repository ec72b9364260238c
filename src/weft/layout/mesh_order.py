"""Whether the order of a mesh's axes puts the ones that send most across nodes, by what axes send in general. Pure."""

from __future__ import annotations

from weft.core.dimension import dimensions, local_update_axes, sequence_axes
from weft.core.mesh import Mesh
from weft.core.node_placement import NodePlacement, orders


def order_problem(mesh: Mesh, placement: NodePlacement) -> str:
    """What is wrong with the order of the axes where ranks are placed so; "" if nothing is, or no
    other order is better.

    An axis that sends in every layer, one further in than `dp` in the order `pp dp ep cp tp`, may
    cross nodes only if no axis further out stays within them.
    """
    pair = _in_the_wrong_places(mesh, placement)
    if pair is None:
        return ""
    better = next((order for order in orders(mesh) if _is_right(order, placement)), None)
    if better is None:
        return ""
    crossing, inside = pair
    return (
        f"mesh order: {crossing}{mesh.degree(crossing)} is on "
        f"{placement.most_nodes(mesh, (crossing,))} nodes, and {inside}{mesh.degree(inside)}, which "
        f'sends less, is on one: --mesh "{better}" has it the other way round'
    )


def _is_right(mesh: Mesh, placement: NodePlacement) -> bool:
    return _in_the_wrong_places(mesh, placement) is None


def _in_the_wrong_places(mesh: Mesh, placement: NodePlacement) -> tuple[str, str] | None:
    """An axis that crosses nodes, and one that sends less and does not; None where there are none."""
    if placement.is_one_node:
        return None
    inward = sorted(mesh.wide_axes, key=lambda name: dimensions()[name].nesting)
    crossing = [name for name in inward if placement.most_nodes(mesh, (name,)) > 1]
    data_axes = [name for name in sequence_axes() if name not in local_update_axes()]
    once_a_step = min(dimensions()[name].nesting for name in data_axes)
    for name in reversed(crossing):
        if dimensions()[name].nesting <= once_a_step:
            break
        outer = [each for each in inward[: inward.index(name)] if each not in crossing]
        if outer:
            return name, outer[-1]
    return None
