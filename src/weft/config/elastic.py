"""Elastic layouts: the best smaller mesh for a world with fewer ranks than the configured mesh. Pure functions.

configured   ranks   chosen
dp4 tp2      8       dp4 tp2
dp4 tp2      4       dp2 tp2      data parallelism shrinks first: every other axis shards what may not fit otherwise
dp2 pp2 tp2  2       tp2          then the fewest ranks are taken from the other axes, from cp first, from tp last
dp2 fsdp4    6       dp2 fsdp3    copies of the states leave before their shards grow
site3 dp2    4       site2 dp2    whole sites leave before anything shrinks inside of them
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from weft.config.rules.layout import divisors
from weft.config.rules.suggestions import mesh_text
from weft.core.axes import local_update_axis
from weft.core.dimension import data_axis, local_update_axes, plain_data_axes
from weft.core.mesh import Mesh

KEPT_FIRST = ("tp", "ep", "pp", "cp")
"""Among layouts that take equally many ranks from the other axes, the one that keeps these, in this
order.
"""


def fit_to_ranks(mesh: Mesh, size: int, *, is_valid: Callable[[str], bool]) -> str | None:
    """The best mesh of exactly `size` ranks: the given one if it has that size; None if there is
    none.

    Args:
        is_valid: whether the run passes all checks with a mesh; its global batch stays, and so do
            its numbers.
    """
    if mesh.size == size:
        return mesh.text
    if mesh.size < size:
        return None
    for smaller in smaller_meshes(mesh, size):
        if is_valid(smaller):
            return smaller
    return None


def smaller_meshes(mesh: Mesh, size: int) -> tuple[str, ...]:
    """All meshes of `size` ranks whose axes are divisors of the given ones, except those that shard
    sequences alone and those of local updates (any number up to the given one) and the data axis
    (any number); best first.
    """
    data = data_axis()
    others = [(axis, degree) for axis, degree in mesh.axes if axis != data]
    choices = [_degrees_to_try(axis, degree) for axis, degree in others]
    names = [axis for axis, _ in others]
    found: list[tuple[tuple[float, ...], str]] = []
    for degrees in itertools.product(*choices):
        data_ranks, rest = divmod(size, math.prod(degrees))
        if rest or not data_ranks:
            continue
        chosen = {data: data_ranks}
        chosen.update(zip(names, degrees, strict=True))
        cost = _cost(mesh, chosen)
        found.append((cost, mesh_text(mesh, chosen)))
    return tuple(text for _, text in sorted(found))


def _degrees_to_try(axis: str, degree: int) -> tuple[int, ...]:
    if axis in (*local_update_axes(), *plain_data_axes()):
        return tuple(range(1, degree + 1))
    return divisors(degree)


def _cost(mesh: Mesh, chosen: Mapping[str, int]) -> tuple[float, ...]:
    """What is compared, most important first: how much smaller the axes are together, how far the
    data ranks are from the configured ones where they train apart, how much smaller each axis is.
    """
    others = (data_axis(), *local_update_axes())
    shrink = {axis: old / chosen[axis] for axis, old in mesh.axes if axis not in others}
    other_data_ranks = 0.0
    if local_update_axis(mesh) is not None:
        data_ranks = chosen[data_axis()]
        other_data_ranks = abs(math.log(data_ranks / mesh.degree(data_axis())))
    shrink_of_each = [shrink.get(axis, 1.0) for axis in KEPT_FIRST]
    return (math.prod(shrink.values()), other_data_ranks, *shrink_of_each)


def elastic_note(mesh: Mesh, full_mesh: Mesh) -> str:
    """One line about a run on a smaller layout than the configured one."""
    return (
        f"{mesh.size} of {full_mesh.size} ranks: layout {mesh} instead of {full_mesh} "
        "(run.elastic), same global batch"
    )
