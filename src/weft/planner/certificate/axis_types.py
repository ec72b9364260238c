"""Types of a tensor along a mesh axis: replicated, sharded, partial, varying; pure values, no torch.

Note [Types along an axis]
    The types of `spmd_types` (Meta) and the placements of DTensor, for one axis at a time:

        replicated   every rank holds the same entries
        zero         every rank holds zeros: replicated, a summand of nothing, and a shard of zeros
        sharded      each rank holds its own entries; which dims are sharded is known
        partial      the value is the sum of what the ranks hold
        varying      ranks hold different entries, and how they belong together is known to the
                     code of a declared region alone
        untyped      an operation without a rule made it: whatever it meets is untyped, and the
                     verdict is "unknown"

    `spmd_types` infers the type of a gradient from the type of its tensor, for which it needs two
    kinds of replicated tensors: "invariant", whose gradient is replicated, and "replicate", whose
    gradient is partial. Here the operations of the backward are typed like those of the forward,
    so a gradient has a type of its own and one kind of replicated is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.parallel.tensor.dims import Dims, is_sharded, whole_dims

Kind = Literal["replicated", "zero", "sharded", "partial", "varying", "untyped"]


class TypeMismatchError(Exception):
    """An operation whose operands do not fit together along an axis."""


class UntypedError(Exception):
    """An operation without a rule."""


@dataclass(frozen=True, slots=True)
class AxisType:
    """The type of a tensor along one axis; see Note [Types along an axis].

    Attributes:
        dims: of the tensor; which of them are sharded is known for "sharded" alone.
    """

    kind: Kind
    dims: Dims = ()

    @property
    def is_same_everywhere(self) -> bool:
        """Whether all ranks hold the same entries."""
        return self.kind in ("replicated", "zero")

    @property
    def text(self) -> str:
        """`sharded in dim 1`, `partial`."""
        if self.kind != "sharded":
            return self.kind
        places = [str(place) for place, dim in enumerate(self.dims) if is_sharded(dim)]
        return f"sharded in dim {' and '.join(places)}"


PARTIAL = AxisType("partial")
VARYING = AxisType("varying")
UNTYPED = AxisType("untyped")
ZERO = AxisType("zero")


def replicated(shape: tuple[int, ...]) -> AxisType:
    """The type of a tensor that every rank holds whole."""
    return AxisType("replicated", whole_dims(shape))


def of_dims(dims: Dims) -> AxisType:
    """The type of a tensor with these dims: sharded, or replicated."""
    if any(map(is_sharded, dims)):
        return AxisType("sharded", dims)
    return AxisType("replicated", dims)


Types = tuple[AxisType, ...]
"""The type of a tensor along each of the axes of a mesh that are typed, in their order."""


def flattened(types: Types, numel: int) -> Types:
    """The types of the same entries in one dim, or of some of them."""
    found = []
    for each in types:
        match each.kind:
            case "replicated":
                found.append(replicated((numel,)))
            case "sharded":
                found.append(VARYING)
            case _:
                found.append(each)
    return tuple(found)
