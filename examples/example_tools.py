"""Shared by the examples: print a line from rank 0, print a table over ranks, compare with one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft import Comm

WIDTH = 64
"""Characters that a rank may print in a row of a table."""
ALLOWED = 1e-11
"""Largest difference. The examples compute in float64, whose sums of a few hundred numbers round at
about 1e-14.
"""


class DifferenceError(Exception):
    """An example did not compute what one process does."""


def say(comm: Comm, text: str = "") -> None:
    """Print a line on rank 0."""
    if comm.rank == 0:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def table(comm: Comm, titles: Sequence[str], cells: Sequence[str]) -> None:
    """Print one row for each rank, in the order of ranks; every rank passes its own cells."""
    axes = tuple(name for name, _ in comm.mesh.axes)
    encoded = comm.gather(_encode("\t".join(cells)), axes)
    if encoded is None:
        return
    rows = [_decode(line).split("\t") for line in encoded]
    widths = [max(len(cell) for cell in column) for column in zip(titles, *rows, strict=True)]
    heads = ("rank", *(str(rank) for rank in range(len(rows))))
    for head, row in zip(heads, (titles, *rows), strict=True):
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line = f"  {head:<6}" + "   ".join(padded)
        say(comm, line.rstrip())


def same(what: str, got: Tensor, want: Tensor, *, allowed: float = ALLOWED) -> None:
    """Compare `got` with `want`, which one process computed.

    Raises:
        DifferenceError: they differ; weft then names the rank, ends the others, and the command
            exits with 1.
    """
    if got.shape != want.shape:
        raise DifferenceError(
            f"{what} has shape {list(got.shape)}, on one process {list(want.shape)}"
        )
    error = (got - want).abs().max().item()
    if not error <= allowed:  # a NaN is not
        raise DifferenceError(
            f"{what} differs from one process by {error:.2g} (allowed {allowed:g})"
        )


def gradient(param: Tensor) -> Tensor:
    """The gradient after a backward."""
    assert param.grad is not None, "no backward has reached this parameter"
    return param.grad


def same_gradients(what: str, got: nn.Module, want: nn.Module) -> None:
    """`same` for the gradients of two modules with parameters of the same names."""
    for name, param in want.named_parameters():
        same(f"{what}: gradient of {name}", gradient(got.get_parameter(name)), gradient(param))


def numbers(x: Tensor) -> str:
    """`[10 11 12]`, or `[[0 1] [2 3]]`."""
    return f"[{' '.join(map(numbers, x))}]" if x.dim() else f"{x.item():g}"


def _encode(text: str) -> Tensor:
    return torch.tensor([*text.encode().ljust(WIDTH)[:WIDTH]], dtype=torch.uint8)


def _decode(line: Tensor) -> str:
    return bytes(line.tolist()).decode().rstrip()
