"""Owns reductions that weft computes itself: always in rank order, so that they give the same bits every time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.comm.transport import Reduce

_INTO: dict[Reduce, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda total, piece: total.add_(piece),
    "avg": lambda total, piece: total.add_(piece),
    "max": lambda total, piece: torch.maximum(total, piece, out=total),
    "min": lambda total, piece: torch.minimum(total, piece, out=total),
    "product": lambda total, piece: total.mul_(piece),
}


def combine(pieces: Sequence[Tensor], op: Reduce) -> Tensor:
    """The reduction of `pieces`, first to last, in new memory on the first one's device.

    16-bit floats are accumulated in float32 and rounded once.
    """
    first = pieces[0]
    total = first.to(_accumulator(first.dtype), copy=True)
    for piece in pieces[1:]:
        _INTO[op](total, piece.to(total.device, total.dtype))
    if op == "avg":
        total.div_(len(pieces))
    return total.to(first.dtype)


def fold(total: Tensor, piece: Tensor, op: Reduce) -> None:
    """The reduction of two, into the first; the same bits as `combine`, whichever of them stands first."""
    if _accumulator(total.dtype) != total.dtype:
        total.copy_(combine((total, piece), op))
        return
    _INTO[op](total, piece)
    if op == "avg":
        total.div_(2)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
