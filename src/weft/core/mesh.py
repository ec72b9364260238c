"""Owns the mesh: rank <-> coordinates, groups, neighbours, and the overview that shows all groups."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from weft.errors import Fault, MeshError, did_you_mean

AXES = ("pp", "dp", "ep", "cp", "tp")
AXIS_MEANING = {
    "pp": "pipeline: blocks are cut into stages",
    "dp": "data: sequences are cut",
    "ep": "expert: sequences are cut, experts too",
    "cp": "context: each sequence is cut along its length",
    "tp": "tensor: heads, feed-forward and vocabulary are cut",
}
DATA_AXES = ("dp", "ep", "cp")
"""Mesh axes along which the tokens of one micro-batch differ between ranks."""

Axis = str | tuple[str, ...]
"""One mesh axis, or several taken together as one group."""


@dataclass(frozen=True)
class Mesh:
    """Ranks as a grid: axes from the outermost (slowest) to the innermost (fastest varying).

    >>> mesh = Mesh.parse("pp2 dp2 tp2")
    >>> mesh.size, mesh.coord(5), mesh.group(5, "tp"), mesh.group(5, ("pp", "dp"))
    (8, {'pp': 1, 'dp': 0, 'tp': 1}, (4, 5), (1, 3, 5, 7))
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        """Read `"dp2 pp2 tp2"`: axis names with their degrees, outermost first; `""` is one rank.

        Raises:
            MeshError: with every fault of the text.
        """
        faults: list[Fault] = []
        axes: list[tuple[str, int]] = []
        for word in text.replace(",", " ").split():
            match = re.fullmatch(r"([A-Za-z]+)(\d+)", word)
            if not match:
                faults.append(
                    Fault(
                        "mesh",
                        f"cannot read {word!r}",
                        need="axis names with degrees",
                        fix='write it like "pp2 dp2 tp2"',
                    )
                )
                continue
            name, degree = match[1], int(match[2])
            if name not in AXES:
                faults.append(Fault("mesh", f"unknown axis {name!r}", got=repr(text), fix=did_you_mean(name, AXES)))
            elif name in dict(axes):
                faults.append(Fault("mesh", f"axis {name!r} appears twice", got=repr(text), fix=f"keep one {name!r}"))
            elif degree < 1:
                faults.append(
                    Fault("mesh", f"axis {name!r} has degree {degree}", need="at least 1", fix=f"drop {word!r}")
                )
            else:
                axes.append((name, degree))
        if faults:
            raise MeshError(*faults)
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        return " ".join(f"{name}{degree}" for name, degree in self.axes) or "1 rank"

    @property
    def text(self) -> str:
        """The text that `parse` reads back."""
        return " ".join(f"{name}{degree}" for name, degree in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(degree for _, degree in self.axes)

    def degree(self, axis: Axis) -> int:
        """Number of ranks along `axis`; 1 for an axis that the mesh does not name."""
        degrees = dict(self.axes)
        return math.prod(degrees.get(name, 1) for name in axis_names(axis))

    def coord(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank`, outermost axis first."""
        if not 0 <= rank < self.size:
            raise MeshError(Fault("mesh", f"rank {rank} is outside the mesh", need=f"0 to {self.size - 1}"))
        reversed_coord: list[tuple[str, int]] = []
        for name, degree in reversed(self.axes):
            rank, index = divmod(rank, degree)
            reversed_coord.append((name, index))
        return dict(reversed(reversed_coord))

    def rank(self, **coord: int) -> int:
        """Rank at these coordinates; axes that are not given count as 0."""
        unknown = set(coord) - {name for name, _ in self.axes} - {name for name in AXES if coord.get(name) == 0}
        if unknown:
            raise MeshError(Fault("mesh", f"no axis {sorted(unknown)} in {self}"))
        rank = 0
        for name, degree in self.axes:
            index = coord.get(name, 0)
            if not 0 <= index < degree:
                raise MeshError(
                    Fault("mesh", f"coordinate {name}={index} is outside the mesh", need=f"0 to {degree - 1}")
                )
            rank = rank * degree + index
        return rank

    def index(self, rank: int, axis: Axis) -> int:
        """Place of `rank` inside its group along `axis`: 0 for an axis that the mesh does not name."""
        coord, place = self.coord(rank), 0
        for name in self._ordered(axis):
            place = place * self.degree(name) + coord[name]
        return place

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `axis`, in mesh order; `rank` itself is among them."""
        coord = self.coord(rank)
        inner = self._ordered(axis)
        places = itertools.product(*(range(self.degree(name)) for name in inner))
        return tuple(self.rank(**{**coord, **dict(zip(inner, place, strict=True))}) for place in places)

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along `axis`: together they hold every rank exactly once."""
        inner = self._ordered(axis)
        firsts = (rank for rank in range(self.size) if not any(self.coord(rank)[name] for name in inner))
        return tuple(self.group(first, axis) for first in firsts)

    def neighbour(self, rank: int, axis: str, step: int = 1) -> int:
        """Rank `step` places further along `axis`; the axis is a ring."""
        coord = self.coord(rank)
        return self.rank(**{**coord, axis: (coord.get(axis, 0) + step) % self.degree(axis)}) if axis in coord else rank

    def coord_text(self, rank: int) -> str:
        """Coordinates of `rank` as text: `pp1 dp0 tp1`."""
        return " ".join(f"{name}{index}" for name, index in self.coord(rank).items()) or "alone"

    def overview(self, most: int = 8) -> str:
        """A table of all groups of every axis, at most `most` groups a line."""
        lines = [f"mesh {self}: {self.size} rank{'s' * (self.size > 1)}"]
        for name, degree in self.axes:
            groups = self.groups(name)
            shown = "  ".join("[" + " ".join(map(str, group)) + "]" for group in groups[:most])
            more = f"  … {len(groups) - most} more" if len(groups) > most else ""
            lines.append(f"  {name} x{degree:<3} {len(groups):>4} groups  {shown}{more}  ({AXIS_MEANING[name]})")
        return "\n".join(lines)

    def _ordered(self, axis: Axis) -> tuple[str, ...]:
        wanted = set(axis_names(axis))
        return tuple(name for name, _ in self.axes if name in wanted)


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Axis names as a tuple, whether one or several were given."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def all_meshes(most_ranks: int, axes: Iterable[str]) -> tuple[Mesh, ...]:
    """Every mesh of up to `most_ranks` ranks over `axes` in the given nesting, degree-1 axes left out."""
    wanted = tuple(axes)
    degrees = itertools.product(range(1, most_ranks + 1), repeat=len(wanted))
    return tuple(
        Mesh(tuple((name, degree) for name, degree in zip(wanted, combination, strict=True) if degree > 1))
        for combination in degrees
        if math.prod(combination) <= most_ranks
    )
