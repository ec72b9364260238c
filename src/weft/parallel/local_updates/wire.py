"""What outer gradients are on the wire between sites: float32, bfloat16, or int8 with one scale for each row.

    wire        an entry x                                    bytes an entry
    float32     rounded to float32                            4
    bfloat16    rounded to bfloat16                           2
    int8        q = round(x / s), half to even, -127 to 127   1, and 4 for each row that is touched
                s = float32(largest |x| of its row / 127)     (a vector is one row); a row of zeros: q = 0

A row is the last dim of the whole parameter, whichever ranks hold parts of it, so the numbers do not
depend on the layout inside a site. Rounding is deterministic. There is no error feedback: every
site starts the next period from the outer parameters, and what rounding lost is part of the next
outer gradient only as far as training repeats it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from weft.core.axes import Box
from weft.core.dimension import local_update_axes
from weft.core.mesh import Mesh
from weft.parallel.local_updates.outer_shard import OuterShard
from weft.parallel.pp import AXIS as PP
from weft.parallel.zero.gradient_reducer import GradientReducer

WireName = Literal["float32", "bfloat16", "int8"]

MOST = 127
"""Largest absolute value of int8 that is used."""
SCALE_BYTES = 4


class WireFormat(Protocol):
    """How a flat outer gradient is sent."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one message."""
        ...

    def encode(self, gradient: Tensor) -> Tensor:
        """The message, one dimension; a collective inside the site for int8."""
        ...

    def decode(self, message: Tensor) -> Tensor:
        """The gradient that a message stands for."""
        ...


@dataclass(frozen=True)
class RoundedWire:
    """Entries in another floating-point type."""

    shard: OuterShard
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one message."""
        return self.shard.length * self.dtype.itemsize

    def encode(self, gradient: Tensor) -> Tensor:
        """The rounded entries."""
        return gradient.to(self.dtype)

    def decode(self, message: Tensor) -> Tensor:
        """The entries in the dtype of parameters."""
        return message.to(self.shard.dtype)


@dataclass(frozen=True)
class _RowsOfBox:
    """Entries of one box, and the scales of its rows.

    Attributes:
        in_flat: place of the entries in the flat gradient.
        in_rows: place of the parameter's rows among those of the stage.
        in_message: place of the scales in a message, counted in scales.
    """

    in_flat: slice
    box: Box
    rows_shape: tuple[int, ...]
    in_rows: slice
    in_message: slice

    @property
    def num_columns(self) -> int:
        """Entries of the box in each row."""
        return self.box.shape[-1] if self.box.shape else 1

    def rows(self, rows_of_stage: Tensor) -> Tensor:
        """The numbers of the box's rows, a view."""
        rows = rows_of_stage[self.in_rows].view(self.rows_shape)
        return rows[self.box.slices[:-1]]


class Int8Wire:
    """Entries as int8 behind the scales of their rows."""

    def __init__(self, shard: OuterShard, reducer: GradientReducer) -> None:
        self.shard = shard
        self.comm = shard.comm
        self._axes = _axes_inside_stage(shard.comm.mesh)
        self._in_rows = _rows_of_stage(shard, reducer)
        self._num_rows = 0
        for rows in self._in_rows.values():
            self._num_rows = max(self._num_rows, rows.stop)
        self._boxes = tuple(self._rows_of_boxes())
        self._num_scales = 0
        for each in self._boxes:
            self._num_scales = each.in_message.stop

    def _rows_of_boxes(self) -> Iterator[_RowsOfBox]:
        first_scale = 0
        for piece in self.shard.pieces:
            shape = self.shard.model.shards[piece.name].shape
            start = piece.in_flat.start
            for box in piece.boxes:
                stop = start + box.size
                last_scale = first_scale + math.prod(box.shape[:-1])
                yield _RowsOfBox(
                    in_flat=slice(start, stop),
                    box=box,
                    rows_shape=shape[:-1],
                    in_rows=self._in_rows[piece.name],
                    in_message=slice(first_scale, last_scale),
                )
                start = stop
                first_scale = last_scale

    @property
    def num_bytes(self) -> int:
        """Bytes of one message."""
        return self._num_scales * SCALE_BYTES + self.shard.length

    def encode(self, gradient: Tensor) -> Tensor:
        """Scales as bytes, then entries; every rank of the site must call it."""
        scales_of_stage = self._scales(gradient)
        device = self.comm.device
        scales = torch.empty(self._num_scales, dtype=torch.float32, device=device)
        entries_int8 = torch.zeros(self.shard.length, dtype=torch.int8, device=device)
        for each in self._boxes:
            rows = each.rows(scales_of_stage).reshape(-1)
            scales[each.in_message] = rows
            steps = torch.where(rows > 0, rows, torch.inf)  # a row of zeros stays zero
            divisor = steps.to(gradient.dtype).unsqueeze(1)
            entries = gradient[each.in_flat].view(-1, each.num_columns)
            rounded = (entries / divisor).round()
            limited = rounded.clamp(-MOST, MOST).view(-1)
            entries_int8[each.in_flat] = limited.to(torch.int8)
        scale_bytes = scales.view(torch.int8)
        return torch.cat((scale_bytes, entries_int8))

    def _scales(self, gradient: Tensor) -> Tensor:
        """Scales of all rows of this rank's stages: the largest entry of each over the site."""
        largest = gradient.new_zeros(self._num_rows)
        for each in self._boxes:
            entries = gradient[each.in_flat].view(-1, each.num_columns)
            rows = each.rows(largest)
            largest_here = entries.abs().amax(1).view(rows.shape)
            rows.copy_(torch.maximum(rows, largest_here))
        # Over the ranks of this site alone: each site has scales of its own, which its message carries.
        self.comm.all_reduce_(largest, self._axes, op="max")
        return (largest / MOST).float()

    def decode(self, message: Tensor) -> Tensor:
        """Entries times the scales of their rows."""
        num_scale_bytes = self._num_scales * SCALE_BYTES
        scale_bytes = message[:num_scale_bytes]
        # A message may begin at any byte of what was gathered; a copy is aligned.
        scales = scale_bytes.clone().view(torch.float32)
        entries_int8 = message[num_scale_bytes:]
        gradient = self.shard.zeros()
        for each in self._boxes:
            rows = scales[each.in_message].to(gradient.dtype)
            entries = entries_int8[each.in_flat].to(gradient.dtype)
            table = entries.view(-1, each.num_columns)
            scaled = table * rows.unsqueeze(1)
            gradient[each.in_flat] = scaled.view(-1)
        return gradient


def wire_format(name: WireName, shard: OuterShard, reducer: GradientReducer) -> WireFormat:
    """The format of this name for the entries that a rank exchanges."""
    if name == "int8":
        return Int8Wire(shard, reducer)
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    return RoundedWire(shard, dtype)


def _axes_inside_stage(mesh: Mesh) -> tuple[str, ...]:
    """Axes along which ranks hold parts of the same rows."""
    apart = (PP, *local_update_axes())
    return tuple(axis for axis in mesh.wide_axes if axis not in apart)


def _rows_of_stage(shard: OuterShard, reducer: GradientReducer) -> dict[str, slice]:
    """Place of each trained parameter's rows among those of this rank's stages; also of parameters
    that only other ranks of the site hold entries of.
    """
    places: dict[str, slice] = {}
    start = 0
    for group in reducer.trained_groups:
        for name in group.params:
            shape = shard.model.shards[name].shape
            stop = start + math.prod(shape[:-1])
            places[name] = slice(start, stop)
            start = stop
    return places
