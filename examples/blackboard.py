"""Owns what the examples share: a line from rank 0, a table over the ranks, and the comparison that ends a wrong example."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft import Comm

WIDTH = 64
"""Characters a rank may put into a row of a table."""
ALLOWED = 1e-11
"""The examples compute in float64, whose sums of a few hundred numbers round at about 1e-14: what is more is a mistake."""


class DifferenceError(Exception):
    """An example did not compute what one process does."""


def say(comm: Comm, text: str = "") -> None:
    """Write a line, once."""
    if comm.rank == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def table(comm: Comm, titles: Sequence[str], cells: Sequence[str]) -> None:
    """Write one row for each rank, in the order of ranks; every rank brings its own cells."""
    axes = tuple(name for name, _ in comm.mesh.axes)
    rows = [_read(line).split("\t") for line in comm.gather(_written("\t".join(cells)), axes) or ()]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)] if rows else []
    for head, row in zip(("rank", *range(len(rows))), (titles, *rows), strict=False):
        say(
            comm,
            f"  {head:<6}" + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip(),
        )


def same(what: str, got: Tensor, want: Tensor, *, allowed: float = ALLOWED) -> None:
    """Go on where `got` is what one process computed.

    Raises:
        DifferenceError: it is not; weft then names the rank, ends the others, and the command exits with 1.
    """
    if got.shape != want.shape:
        raise DifferenceError(f"{what} has shape {list(got.shape)}, on one process {list(want.shape)}")
    error = (got - want).abs().max().item()
    if not error <= allowed:  # a NaN is not
        raise DifferenceError(f"{what} differs from one process by {error:.2g} (allowed {allowed:g})")


def gradient(param: Tensor) -> Tensor:
    """The gradient, which the backward has found."""
    assert param.grad is not None, "no backward has come by"
    return param.grad


def same_gradients(what: str, got: nn.Module, want: nn.Module) -> None:
    """`same` for the gradients of two modules with parameters of the same names."""
    for name, param in want.named_parameters():
        same(f"{what}: gradient of {name}", gradient(got.get_parameter(name)), gradient(param))


def numbers(x: Tensor) -> str:
    """`[10 11 12]`, or `[[0 1] [2 3]]`."""
    return f"[{' '.join(map(numbers, x))}]" if x.dim() else f"{x.item():g}"


def _written(text: str) -> Tensor:
    return torch.tensor([*text.encode().ljust(WIDTH)[:WIDTH]], dtype=torch.uint8)


def _read(line: Tensor) -> str:
    return bytes(line.tolist()).decode().rstrip()
