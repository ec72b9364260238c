"""Elastic layouts: the best smaller mesh for a world with fewer ranks than the configured mesh. Pure functions.

configured   ranks   chosen
dp4 tp2      8       dp4 tp2
dp4 tp2      4       dp2 tp2      data parallelism shrinks first: every other axis shards what may not fit otherwise
dp2 pp2 tp2  2       tp2          then the fewest ranks are taken from the other axes, from cp first, from tp last
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from weft.config.suggestions import mesh_text
from weft.config.validate import divisors
from weft.core.dimension import data_axis
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
    """All meshes of `size` ranks whose axes, except the data axis, are divisors of the given ones;
    best first.
    """
    data = data_axis()
    others = [(axis, degree) for axis, degree in mesh.axes if axis != data]
    choices = [divisors(degree) for _, degree in others]
    found: list[tuple[tuple[float, ...], str]] = []
    for degrees in itertools.product(*choices):
        data_ranks, rest = divmod(size, math.prod(degrees))
        if rest or not data_ranks:
            continue
        chosen: dict[str, int] = {data: data_ranks}
        shrink: dict[str, float] = {}
        for (axis, configured), degree in zip(others, degrees, strict=True):
            chosen[axis] = degree
            shrink[axis] = configured / degree
        kept = [shrink.get(axis, 1.0) for axis in KEPT_FIRST]
        cost = (math.prod(shrink.values()), *kept)
        found.append((cost, mesh_text(mesh, chosen)))
    return tuple(text for _, text in sorted(found))


def elastic_note(mesh: Mesh, full_mesh: Mesh) -> str:
    """One line about a run on a smaller layout than the configured one."""
    return (
        f"{mesh.size} of {full_mesh.size} ranks: layout {mesh} instead of {full_mesh} "
        "(run.elastic), same global batch"
    )
