"""Matrices in 4 bits in a checkpoint: sections of their bytes, and the model that is read from them.

    nf4/rows/<parameter>       blocks along rows: [features out, bytes of a row]
    nf4/columns/<parameter>    blocks along columns: [features in, bytes of a column]

The bytes of a line are its codes, two in a byte, then the absmax of its blocks in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.core.axes import Box
from weft.models.common.nf4 import unpack, unpacked_width

NF4_SECTIONS = ("nf4/columns", "nf4/rows")
"""Sections by the dim along which blocks run."""


@dataclass(frozen=True)
class DequantizedSource:
    """The parameters of a model whose checkpoint holds some in 4 bits, as a `Source`.

    Args:
        others: all other parameters.
        packed: the bytes, by the dim along which blocks run.
        compute: dtype of the dequantized matrices: that in which the run computed with them.
    """

    others: Source
    packed: tuple[Source, ...]
    compute: torch.dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every parameter."""
        found = dict(self.others.shapes)
        for dim, source in enumerate(self.packed):
            for name, (num_lines, width) in source.shapes.items():
                lines_first = (num_lines, unpacked_width(width))
                found[name] = lines_first if dim == 1 else lines_first[::-1]
        return found

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the entries that `read` returns."""
        return self.others.dtype(name) if self._dim(name) is None else self.compute

    def read(self, name: str, box: Box) -> Tensor:
        """The entries of a box: the lines that it crosses are dequantized whole."""
        dim = self._dim(name)
        if dim is None:
            return self.others.read(name, box)
        source = self.packed[dim]
        _, width = source.shapes[name]
        lines = Box((box.lo[1 - dim], 0), (box.hi[1 - dim], width))
        start, stop = box.lo[dim], box.hi[dim]
        entries = unpack(source.read(name, lines), dim=dim).narrow(dim, start, stop - start)
        return entries.to(self.compute, copy=True, memory_format=torch.contiguous_format)

    def _dim(self, name: str) -> int | None:
        return next((dim for dim, source in enumerate(self.packed) if name in source.shapes), None)
