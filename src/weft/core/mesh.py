"""Device mesh: ranks as a grid of named axes; coordinates, groups, and an overview of all groups."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.core.dimension import all_axes, dimensions
from weft.errors import Fault, MeshError, counted, did_you_mean

Axis = str | tuple[str, ...]
"""One mesh axis, or several that together form one group."""
Ranks = tuple[int, ...]

WIDTH = 80
"""Columns of the overview."""
MAX_RANKS_SHOWN = 8
"""Ranks of a group that the overview lists one by one; longer groups are shown by first ranks, last
rank and step.
"""


@dataclass(frozen=True)
class Mesh:
    """Ranks as a grid: axes from the outermost (slowest) to the innermost (fastest varying).

    >>> mesh = Mesh.parse("pp2 dp2 tp2")
    >>> mesh.size, mesh.coord(5), mesh.group(5, "tp"), mesh.group(5, ("pp", "dp"))
    (8, {'pp': 1, 'dp': 0, 'tp': 1}, (4, 5), (1, 3, 5, 7))
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    @functools.cache
    def parse(text: str) -> Mesh:
        """Read `"dp2 pp2 tp2"`: axis names with their degrees, outermost first; `""` is one rank.

        Raises:
            MeshError: with every fault of the text.
        """
        faults: list[Fault] = []
        degrees: dict[str, int] = {}
        for word in text.replace(",", " ").split():
            fault = _read_axis(word, degrees, text)
            if fault is not None:
                faults.append(fault)
        if faults:
            raise MeshError(*faults)
        return Mesh(tuple(degrees.items()))

    def __str__(self) -> str:
        return self.text or "1 rank"

    @property
    def text(self) -> str:
        """The text that `parse` reads back."""
        words = [f"{name}{degree}" for name, degree in self.axes]
        return " ".join(words)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(degree for _, degree in self.axes)

    @property
    def wide_axes(self) -> tuple[str, ...]:
        """Axes with more than one rank, in mesh order."""
        names: list[str] = []
        for name, degree in self.axes:
            if degree > 1:
                names.append(name)
        return tuple(names)

    def degree(self, axis: Axis) -> int:
        """Number of ranks along `axis`; 1 for an axis that the mesh does not name."""
        degrees = dict(self.axes)
        product = 1
        for name in axis_names(axis):
            product *= degrees.get(name, 1)
        return product

    def coord(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank`, outermost axis first."""
        if not 0 <= rank < self.size:
            fault = Fault("mesh", f"rank {rank} is outside the mesh", need=f"0 to {self.size - 1}")
            raise MeshError(fault)
        inner_first: list[tuple[str, int]] = []
        for name, degree in reversed(self.axes):
            rank, index = divmod(rank, degree)
            inner_first.append((name, index))
        return dict(reversed(inner_first))

    def rank(self, **coord: int) -> int:
        """Rank at these coordinates; axes that are not given count as 0."""
        self._check_names(coord)
        rank = 0
        for name, degree in self.axes:
            index = coord.get(name, 0)
            if not 0 <= index < degree:
                fault = Fault(
                    "mesh",
                    f"coordinate {name}={index} is outside the mesh",
                    need=f"0 to {degree - 1}",
                )
                raise MeshError(fault)
            rank = rank * degree + index
        return rank

    def _check_names(self, coord: Mapping[str, int]) -> None:
        """Raise MeshError for axes that the mesh does not have; index 0 of any dimension is
        accepted.
        """
        degrees = dict(self.axes)
        unknown: list[str] = []
        for name, index in coord.items():
            if name in degrees:
                continue
            is_first_of_absent_axis = index == 0 and name in all_axes()
            if not is_first_of_absent_axis:
                unknown.append(name)
        if unknown:
            fault = Fault("mesh", f"no axis {sorted(unknown)} in {self}")
            raise MeshError(fault)

    def index(self, rank: int, axis: Axis) -> int:
        """Index of `rank` in its group along `axis`; 0 for an axis that the mesh does not name."""
        coord = self.coord(rank)
        index = 0
        for name in self._in_mesh_order(axis):
            index = index * self.degree(name) + coord[name]
        return index

    def group(self, rank: int, axis: Axis) -> Ranks:
        """Ranks that differ from `rank` only along `axis`, in mesh order, `rank` included."""
        coord = self.coord(rank)
        strides = self._strides()
        members = [rank]
        for name in self._in_mesh_order(axis):
            wider: list[int] = []
            for member in members:
                first = member - coord[name] * strides[name]
                wider.extend(first + index * strides[name] for index in range(self.degree(name)))
            members = wider
        return tuple(members)

    def groups(self, axis: Axis) -> tuple[Ranks, ...]:
        """All groups along `axis`: together they hold every rank exactly once."""
        return tuple(self.iter_groups(axis))

    def iter_groups(self, axis: Axis) -> Iterator[Ranks]:
        """The groups along `axis`, one at a time."""
        inner = self._in_mesh_order(axis)
        strides = self._strides()
        offsets: list[range] = []
        for name, degree in self.axes:
            if name in inner:
                continue
            stride = strides[name]
            offsets.append(range(0, degree * stride, stride))
        for outer_offsets in itertools.product(*offsets):
            first_rank = sum(outer_offsets)
            yield self.group(first_rank, axis)

    def coord_text(self, rank: int) -> str:
        """Coordinates of `rank` as text: `pp1 dp0 tp1`; `single rank` for a mesh without axes."""
        words = [f"{name}{index}" for name, index in self.coord(rank).items()]
        return " ".join(words) or "single rank"

    def overview(self) -> str:
        """The groups of every axis and what the axis shards, clipped to 80 columns."""
        name = "mesh"
        if self.axes:
            name = f"mesh {self}"
        lines = [f"{name}: {counted(self.size, 'rank')}"]
        for axis, degree in self.axes:
            dimension = dimensions()[axis]
            num_groups = self.size // degree
            groups = counted(num_groups, "group")
            members = self._groups_text(axis, num_groups)
            lines.append(f"  {axis}{degree} {dimension.summary}")
            lines.append(f"    {groups}: {members}")
        return "\n".join(lines)

    def _groups_text(self, axis: str, num_groups: int) -> str:
        """As many groups as fit in a line: `[0 1] [2 3] ... 2 more`."""
        room = WIDTH - 40  # for the indented number of groups before, and "... N more" after
        shown = ""
        for num_shown, group in enumerate(self.iter_groups(axis)):
            text = _group_text(group)
            longer = f"{shown} {text}" if shown else text
            if shown and len(longer) > room:
                num_left = num_groups - num_shown
                return f"{shown} ... {num_left} more"
            shown = longer
        return shown

    def _strides(self) -> dict[str, int]:
        """Difference between the ranks of two neighbours along each axis."""
        strides: dict[str, int] = {}
        stride = 1
        for name, degree in reversed(self.axes):
            strides[name] = stride
            stride *= degree
        return strides

    def _in_mesh_order(self, axis: Axis) -> tuple[str, ...]:
        wanted = axis_names(axis)
        names: list[str] = []
        for name, _ in self.axes:
            if name in wanted:
                names.append(name)
        return tuple(names)


AXES_ELSEWHERE = {
    "zero": "--mesh dp{} --parallel.zero 3",
    "ddp": "--mesh dp{}",
    "sp": "--mesh tp{} --parallel.sequence True",
    "mp": "--mesh tp{}",
}
"""Axes of other programs -> what means the same."""


def _read_axis(word: str, degrees: dict[str, int], text: str) -> Fault | None:
    """Add the axis that `word` names to `degrees`, or say what is wrong with it."""
    match = re.fullmatch(r"([A-Za-z]+)([0-9]+)", word)
    if match is None:
        need, fix = "axis names with degrees", 'write it like "pp2 dp2 tp2"'
        return Fault("mesh", f"cannot read {word!r}", need=need, fix=fix)
    name, degree = match[1], int(match[2])
    if name not in all_axes():
        meant = AXES_ELSEWHERE.get(name.lower(), "").format(degree)
        fix = meant or did_you_mean(name.lower(), all_axes())
        return Fault("mesh", f"unknown axis {name!r}", got=repr(text), fix=fix)
    if name in degrees:
        return Fault(
            "mesh", f"axis {name!r} appears twice", got=repr(text), fix=f"keep one {name!r}"
        )
    if degree < 1:
        return Fault(
            "mesh", f"axis {name!r} has degree {degree}", need="at least 1", fix=f"drop {word!r}"
        )
    degrees[name] = degree
    return None


def _group_text(group: Ranks) -> str:
    """Ranks of a group along one axis: `[0 1 2 3]`, or `[0 8 ... 1016 (step 8)]` for a long one."""
    if len(group) <= MAX_RANKS_SHOWN:
        members = " ".join(map(str, group))
        return f"[{members}]"
    first, second, *_, last = group
    step = second - first
    return f"[{first} {second} ... {last} (step {step})]"


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Axis names as a tuple, whether one or several were given."""
    if isinstance(axis, str):
        return (axis,)
    return tuple(axis)


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0 2`, for messages."""
    noun = "ranks" if len(ranks) > 1 else "rank"
    numbers = " ".join(map(str, ranks))
    return f"{noun} {numbers}"
