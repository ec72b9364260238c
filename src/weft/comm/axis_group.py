"""`AxisGroup`: the ranks along a mesh axis, and their calls."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.comm.transport import Call, Communicator, Op, Reduce
from weft.core.dimension import all_axes
from weft.core.mesh import Axis, Mesh, axis_names
from weft.errors import CommError, Fault, MeshError, did_you_mean


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along an axis.

    Attributes:
        axis: mesh axis, or several joined by "+".
        ranks: world ranks in mesh order.
        index: this rank's place in `ranks`.
        checked: whether members compare signatures before each call.
        communicator: which of the group's communicators carries its calls.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    checked: bool = True
    communicator: Communicator = "group"

    @property
    def degree(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def call(
        self,
        op: Op,
        signature: str,
        *,
        input: Tensor | None = None,
        output: Tensor | None = None,
        input_split_sizes: tuple[int, ...] = (),
        output_split_sizes: tuple[int, ...] = (),
        reduce: Reduce = "sum",
        root: int = 0,
    ) -> Call:
        """A call of this group; the arguments are fields of `Call`."""
        return Call(
            op=op,
            axis=self.axis,
            ranks=self.ranks,
            index=self.index,
            signature=signature,
            input=input,
            output=output,
            input_split_sizes=input_split_sizes,
            output_split_sizes=output_split_sizes,
            reduce=reduce,
            root=root,
            checked=self.checked,
            communicator=self.communicator,
        )

    def check_member(self, index: int, what: str) -> None:
        """Raise CommError unless `index` is a place in the group."""
        if not 0 <= index < self.degree:
            raise CommError(f"{what} {index} is outside axis {self.axis!r} of degree {self.degree}")


def axis_group(
    mesh: Mesh,
    rank: int,
    axis: Axis,
    *,
    checked: bool,
) -> AxisGroup:
    """The group of `rank` along `axis`; axes of degree 1 are left out of its name.

    Raises:
        MeshError: an axis of an unknown name.
    """
    wanted = axis_names(axis)
    known = all_axes()
    for name in wanted:
        if name not in known:
            fix = did_you_mean(name, known)
            raise MeshError(Fault("axis", f"unknown axis {name!r}", fix=fix))
    present = tuple(name for name, degree in mesh.axes if name in wanted and degree > 1)
    return AxisGroup(
        axis="+".join(present or wanted),
        ranks=mesh.group(rank, present),
        index=mesh.index(rank, present),
        checked=checked,
    )
