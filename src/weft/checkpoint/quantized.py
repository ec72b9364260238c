"""Matrices in 4 bits in a checkpoint: sections of their bytes, and the model that is read from them.

    nf4/rows/<parameter>       blocks along rows: [features out, bytes of a row]
    nf4/columns/<parameter>    blocks along columns: [features in, bytes of a column]

    nf4_double/...             the same under double quantization

The bytes of a line are its codes, two in a byte, then the absmax of its blocks in float32; under double
quantization their shares in 8 bits, then their scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.models.common.nf4 import unpack, unpacked_width

NF4_SECTIONS = ("nf4/columns", "nf4/rows", "nf4_double/columns", "nf4_double/rows")
"""Sections by the dim along which blocks run, without double quantization and with it."""


def section_of(dim: int, *, double: bool) -> str:
    """The section of matrices whose blocks run along a dim."""
    return NF4_SECTIONS[dim + 2 * double]


@dataclass(frozen=True)
class DequantizedSource:
    """The parameters of a model whose checkpoint holds some in 4 bits, as a `Source`.

    Args:
        others: all other parameters.
        packed: the bytes, in the order of `NF4_SECTIONS`.
        compute: dtype of the dequantized matrices: that in which the run computed with them.
    """

    others: Source
    packed: tuple[Source, ...]
    compute: torch.dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter."""
        found = dict(self.others.shapes)
        for place, source in enumerate(self.packed):
            dim, double = place % 2, place >= 2
            for name, (num_lines, width) in source.shapes.items():
                lines_first = (num_lines, unpacked_width(width, double=double))
                found[name] = lines_first if dim == 1 else lines_first[::-1]
        return found

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the entries that `read` returns."""
        return self.others.dtype(name) if self._place(name) is None else self.compute

    def read(self, name: str, box: Box) -> Tensor:
        """The entries of a box: the lines that it crosses are dequantized whole."""
        place = self._place(name)
        if place is None:
            return self.others.read(name, box)
        dim, double = place % 2, place >= 2
        source = self.packed[place]
        _, width = source.shapes[name]
        lines = Box((box.lo[1 - dim], 0), (box.hi[1 - dim], width))
        start, stop = box.lo[dim], box.hi[dim]
        matrix = unpack(source.read(name, lines), dim=dim, double=double)
        entries = matrix.narrow(dim, start, stop - start)
        return entries.to(self.compute, copy=True, memory_format=torch.contiguous_format)

    def _place(self, name: str) -> int | None:
        places = (place for place, source in enumerate(self.packed) if name in source.shapes)
        return next(places, None)
