"""Whether the order of a mesh's axes puts the ones that send most across machines. Pure."""

from __future__ import annotations

from weft.core.dimension import dimensions, local_update_axes, sequence_axes
from weft.core.mesh import Mesh
from weft.errors import WeftError


def order_problem(layout: str, ranks_per_host: int) -> str:
    """What is wrong with the order of the axes where each machine has so many ranks; "" if nothing is.

    An axis that sends in every layer, one further in than `dp` in the order `pp dp ep cp tp`, may
    cross machines only if no axis further out stays within them.
    """
    try:
        mesh = Mesh.parse(layout)
    except WeftError:
        return ""
    if not 1 < ranks_per_host < mesh.size:
        return ""
    inward = sorted(
        (name for name, degree in mesh.axes if degree > 1),
        key=lambda name: dimensions()[name].nesting,
    )
    crossing = [name for name in inward if _crosses(mesh, name, ranks_per_host)]
    data_axes = [name for name in sequence_axes() if name not in local_update_axes()]
    once_a_step = min(dimensions()[name].nesting for name in data_axes)
    for name in reversed(crossing):
        if dimensions()[name].nesting <= once_a_step:
            break
        outer = [each for each in inward[: inward.index(name)] if each not in crossing]
        if outer:
            better = " ".join(f"{each}{mesh.degree(each)}" for each in inward)
            return (
                f"{name} crosses machines ({mesh.size // ranks_per_host} of {ranks_per_host} ranks), and "
                f'{outer[-1]}, which sends less, does not: --mesh "{better}" has it the other way round'
            )
    return ""


def _crosses(mesh: Mesh, axis: str, ranks_per_host: int) -> bool:
    """Whether a group along an axis has ranks on several machines."""
    return any(
        len({rank // ranks_per_host for rank in group}) > 1 for group in mesh.iter_groups(axis)
    )
