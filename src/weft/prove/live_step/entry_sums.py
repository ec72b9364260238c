"""Norms, inner products and largest entries of whole gradients, a piece at a time that stays in the cache of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 2**14
"""Entries whose products a kernel adds in their own type, which rounds to 4e-7 of the sum in float32
(1e-3 without pieces); pieces are added in float64, at an eighth of the time of whole copies in it."""


class EntrySums(NamedTuple):
    """What the entries of two tensors x and y add up to.

    Attributes:
        largest: largest absolute entry of x - y; NaN where there is one.
        length: Euclidean norm of x - y.
        product: inner product of x - y and y.
        norm: Euclidean norm of y.
    """

    largest: float = 0.0
    length: float = 0.0
    product: float = 0.0
    norm: float = 0.0


def compare(x: Tensor, y: Tensor) -> EntrySums:
    """The sums of two tensors of one shape, in the wider of their types."""
    wide = torch.promote_types(x.dtype, y.dtype)
    rows = []
    for one, right in zip(_pieces(x.to(wide)), _pieces(y.to(wide)), strict=True):
        change = one - right
        products = (change @ change, change @ right, right @ right)
        rows.append(torch.stack((*change.aminmax(), *products)))
    if not rows:
        return EntrySums()
    table = torch.stack(rows).double()
    least, most = table[:, :2].unbind(1)
    squares, product, right_squares = table[:, 2:].sum(0).tolist()
    return EntrySums(_largest(least, most), squares**0.5, product, right_squares**0.5)


def norm(x: Tensor) -> float:
    """The Euclidean norm."""
    squares = [piece @ piece for piece in _pieces(x)]
    return float(torch.stack(squares).double().sum() ** 0.5) if squares else 0.0


def largest(x: Tensor) -> float:
    """The largest absolute entry; NaN where there is one."""
    return _largest(*x.aminmax()) if x.numel() else 0.0


def _largest(least: Tensor, most: Tensor) -> float:
    return float(torch.maximum(-least.amin(), most.amax()))


def _pieces(x: Tensor) -> Iterator[Tensor]:
    """Pieces of all entries in order: on a GPU one, whose kernels add in the order of a tree."""
    flat = x.flatten()
    if flat.numel():
        yield from flat.split(flat.numel() if x.is_cuda else PIECE)
