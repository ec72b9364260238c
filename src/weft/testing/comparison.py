"""Inputs of every rank of a group as functions of the rank, expected results in plain torch, and the comparison of the two.

Values are small integers, so that every order of summation gives the same bits in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Reduce
from weft.core.mesh import Axis

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MOVED_DTYPES = (*DTYPES, torch.bool, torch.uint8, torch.complex64)
SUMS: tuple[Reduce, ...] = ("sum", "avg", "max")
DIMS = (0, 1, -1)
"""Dims along which tensors are gathered or scattered."""
LARGE = 70_000
"""Elements of a tensor that is too large for a transport's fast path for small ones."""


class ResultCheck(NamedTuple):
    """One result and its expected value, on the CPU."""

    what: str
    got: Tensor
    expected: Tensor


def is_true(what: str, condition: bool) -> ResultCheck:
    """The comparison that a condition holds."""
    return ResultCheck(what, torch.tensor(condition), torch.tensor(True))


@dataclass(frozen=True)
class GroupInputs:
    """The group of this rank along an axis, and inputs for all its members."""

    comm: Comm
    axis: Axis

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.comm.group(self.axis)

    @property
    def size(self) -> int:
        return self.comm.degree(self.axis)

    @property
    def index(self) -> int:
        return self.comm.index(self.axis)

    def inputs(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """One input for each member, on the CPU."""
        found: list[Tensor] = []
        for rank in self.ranks:
            x = make_input(rank, *shape, dtype=dtype)
            found.append(x)
        return found

    def local(self, tensors: list[Tensor]) -> Tensor:
        """This rank's tensor of one for each member, as a copy on its device."""
        own = tensors[self.index]
        return own.to(self.comm.device, copy=True)

    def compare(self, what: str, got: Tensor, expected: Tensor) -> ResultCheck:
        """A comparison whose text names the axis, too."""
        text = f"{what} {self.axis}"
        return ResultCheck(text, got, expected)


def make_input(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The input of `rank`: values 1, 2, -1, -2 drawn with the rank as seed."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(4, shape, generator=generator)
    values = torch.tensor([1, 2, -1, -2])
    drawn = values[indices]
    return drawn.to(dtype)


def reduce(tensors: list[Tensor], op: Reduce) -> Tensor:
    """The reduction of `tensors` in torch."""
    dtype = tensors[0].dtype
    stacked = torch.stack(tensors)
    match op:
        case "sum":
            return stacked.sum(0).to(dtype)
        case "avg":
            total = stacked.sum(0)
            mean = total / len(tensors)
            return mean.to(dtype)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0).to(dtype)


def groups_of(comm: Comm) -> Iterator[GroupInputs]:
    """The groups of every axis of the mesh, alone and combined with others."""
    names = comm.mesh.wide_axes
    for name in names:
        yield GroupInputs(comm, name)
    for count in range(2, len(names) + 1):
        for combined in itertools.combinations(names, count):
            yield GroupInputs(comm, combined)


def supports(op: Reduce, dtype: torch.dtype) -> bool:
    """An average needs a floating-point dtype."""
    if op != "avg":
        return True
    return dtype.is_floating_point
