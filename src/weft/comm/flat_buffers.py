"""Conversion between tensors and flat buffers: split sizes, packing pieces along a dimension, unpacking them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import CommError


def split_sizes(
    length: int, num_pieces: int, sizes: Sequence[int] | None, *, what: str
) -> tuple[int, ...]:
    """`sizes`, checked to split `length` into `num_pieces`; None splits into equal pieces.

    Raises:
        CommError: they do not; the message begins with `what`, which names the operation, the axis
            and the dimension.
    """
    if sizes is None:
        piece_length, remainder = divmod(length, num_pieces)
        if remainder:
            raise CommError(
                f"{what} has {length} entries, not divisible by {num_pieces}; pass sizes"
            )
        return (piece_length,) * num_pieces
    total = sum(sizes)
    if total != length:
        raise CommError(f"{what} has {length} entries, sizes {list(sizes)} add up to {total}")
    return member_sizes(sizes, num_pieces, what=what)


def member_sizes(sizes: Sequence[int], num_members: int, *, what: str) -> tuple[int, ...]:
    """`sizes`, checked to hold one length >= 0 for each of `num_members`.

    Raises:
        CommError: they do not.
    """
    is_one_per_member = len(sizes) == num_members
    if not is_one_per_member or min(sizes) < 0:
        need = f"{num_members} lengths, one per member, none negative"
        raise CommError(f"{what}: sizes {list(sizes)} must be {need}")
    return tuple(sizes)


def flatten(x: Tensor) -> Tensor:
    """`x` as one contiguous dimension, without autograd; shares memory with `x` if `x` is
    contiguous.
    """
    contiguous = x.detach().contiguous()
    return contiguous.view(-1)


def with_length(shape: Sequence[int], dim: int, length: int) -> tuple[int, ...]:
    """`shape` with the length of dimension `dim` replaced."""
    lengths = list(shape)
    lengths[dim] = length
    return tuple(lengths)


def piece_numels(shape: Sequence[int], dim: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Number of elements of each piece when `shape` is split along `dim` into `sizes`."""
    numel_per_entry = math.prod(with_length(shape, dim, 1))
    return tuple(size * numel_per_entry for size in sizes)


def pack(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """The pieces of `x` along `dim`, one after the other in a flat buffer."""
    if dim == 0:
        return flatten(x)
    pieces = torch.split(x.detach(), list(sizes), dim)
    flat_pieces = [piece.reshape(-1) for piece in pieces]
    return torch.cat(flat_pieces)


def unpack(buffer: Tensor, shapes: Sequence[Sequence[int]], dim: int) -> Tensor:
    """Inverse of `pack`: pieces of `shapes`, one after the other in `buffer`, concatenated along
    `dim`.
    """
    if dim == 0:
        num_rows = sum(shape[0] for shape in shapes)
        whole_shape = with_length(shapes[0], 0, num_rows)
        return buffer.view(whole_shape)
    numels = [math.prod(shape) for shape in shapes]
    flat_pieces = torch.split(buffer, numels)
    pieces = []
    for piece, shape in zip(flat_pieces, shapes, strict=True):
        pieces.append(piece.view(tuple(shape)))
    return torch.cat(pieces, dim)
