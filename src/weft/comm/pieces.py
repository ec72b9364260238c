"""Owns the step between tensors with dimensions and flat memory: cut into pieces, packed, put together again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import CommError


def cut_sizes(length: int, parts: int, sizes: Sequence[int] | None, *, what: str) -> tuple[int, ...]:
    """`sizes` once they are known to cut `length` into `parts`; None cuts evenly.

    Raises:
        CommError: when they do not; `what` names the operation, the axis and the dimension.
    """
    if sizes is None:
        if length % parts:
            raise CommError(f"{what} has {length} entries, not divisible by {parts}; give sizes")
        return (length // parts,) * parts
    if sum(sizes) != length:
        raise CommError(f"{what} has {length} entries, sizes {list(sizes)} add up to {sum(sizes)}")
    return member_sizes(sizes, parts, what=what)


def member_sizes(sizes: Sequence[int], parts: int, *, what: str) -> tuple[int, ...]:
    """`sizes` once they are known to be a length for each of `parts` members."""
    if len(sizes) != parts or min(sizes) < 0:
        raise CommError(f"{what}: sizes {list(sizes)} must be {parts} lengths, one for each member, none negative")
    return tuple(sizes)


def flat(x: Tensor) -> Tensor:
    """`x` as one contiguous line, without autograd; shares memory with `x` where `x` is contiguous."""
    return x.detach().contiguous().view(-1)


def with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """`shape` with dimension `dim` set to `length`."""
    return (*shape[:dim], length, *shape[dim + 1 :])


def counts(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Elements of each piece when `shape` is cut along `dim` into `sizes`."""
    row = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return tuple(size * row for size in sizes)


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The pieces of `x` along `dim`, one after the other in flat memory."""
    if dim == 0:
        return flat(x)
    return torch.cat([piece.reshape(-1) for piece in torch.split(x.detach(), list(sizes), dim)])


def unpack(line: Tensor, shapes: Sequence[Sequence[int]], dim: int) -> Tensor:
    """The inverse: pieces of `shapes`, one after the other in `line`, joined along `dim`."""
    if dim == 0:
        return line.view(with_length(shapes[0], 0, sum(shape[0] for shape in shapes)))
    pieces = torch.split(line, [math.prod(shape) for shape in shapes])
    return torch.cat([piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)], dim)
