"""One traced torch operation: arguments, dims of its tensors, results; and what rules of several kinds share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    canonical,
    is_repeated,
    is_sharded,
    length,
    order,
)


@dataclass(frozen=True)
class TracedOp:
    """A call of a torch operation.

    Attributes:
        name: in torch.ops.aten.
        args: the arguments by name.
        operands: dims of the tensors among the arguments, in order.
        outputs: the results.
    """

    name: str
    args: Mapping[str, Any]
    operands: tuple[Dims, ...]
    outputs: tuple[Tensor, ...]

    @property
    def dims(self) -> Dims:
        """Dims of the first tensor among the arguments."""
        return self.operands[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        first = self.outputs[0]
        return tuple(first.shape)

    def place(self, default: int = 0) -> int:
        """The argument `dim`, from 0."""
        num_dims = len(self.dims)
        written: int = self.args.get("dim", default)
        return written % num_dims


Rule = Callable[[TracedOp], list[Dims]]
"""Dims of an operation's results."""


def reject_sharded(op: TracedOp, places: Iterable[int]) -> None:
    """Raise ShardingError where one of these dims is sharded."""
    for place in places:
        dim = op.dims[place]
        if is_sharded(dim):
            raise ShardingError(f"{op.name} over a sharded dim")


def reject_sums_over(op: TracedOp, *dims: Dim) -> None:
    """Raise ShardingError where a dim that the operation sums over is sharded."""
    for dim in dims:
        if is_sharded(dim):
            raise ShardingError(
                f"{op.name} sums over a sharded dim outside a row-parallel nn.Linear"
            )


def places_named(dims: Dims, written: Any) -> list[int]:
    """The dims that an argument `dim` names, from 0; all where it names none."""
    num_dims = len(dims)
    if written is None or written == []:
        every_place = range(num_dims)
        return list(every_place)
    if not isinstance(written, (tuple, list)):
        written = [written]
    return [place % num_dims for place in written]


def broadcast_dims(name: str, operands: Sequence[Dims], shape: tuple[int, ...]) -> Dims:
    """Where one operand is sharded along a dim, the others are sharded, too, or all their entries
    along it are equal.
    """
    found: list[Dim] = []
    for place in range(-len(shape), 0):
        aligned = [dims[place] for dims in operands if len(dims) >= -place]
        size = shape[place]
        found.append(_broadcast_dim(name, aligned, size))
    return tuple(found)


def _broadcast_dim(name: str, aligned: Sequence[Dim], size: int) -> Dim:
    """One dim of the result, from those of the operands that have it."""
    sharded: list[Dim] = []
    whole: list[Dim] = []
    for dim in aligned:
        if is_sharded(dim):
            sharded.append(dim)
        elif not is_repeated(dim):
            whole.append(dim)
    if sharded and whole:
        num_entries = length(whole[0])
        raise ShardingError(f"{name} of a sharded dim with a whole one of {num_entries} entries")
    if len(set(map(order, sharded))) > 1:
        raise ShardingError(f"{name} of sharded dims that ranks hold in different orders")
    if sharded:
        return canonical(sharded[0])
    return (DimFactor(size, repeated=not whole),)
