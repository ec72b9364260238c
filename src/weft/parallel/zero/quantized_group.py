"""A parameter group in 4 bits: frozen matrices that are dequantized while their block runs, by the hooks of ZeRO 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.shard import Shard
from weft.models.common.nf4 import (
    bytes_of_blocks,
    pack,
    packed_width,
    unpack,
    unpack_into,
    with_length,
)
from weft.parallel.model.parallelize import ParamShard
from weft.parallel.zero.flat_params import FlatParams
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.sharding_policy import ShardingPolicy


class QuantizedGroup(ParamGroup):
    """Frozen matrices of one block of a rank, in NF4; see Note [Blocks of quantized matrices].

    Over `axes`, which are those of ZeRO 3, each rank holds an equal number of whole lines of every
    matrix, and the bytes are all-gathered; without axes, unsharding sends nothing.

    Args:
        dims: name -> dim along which the blocks of a matrix run.
        double: see Note [Double quantization].

    Attributes:
        packed: name -> this rank's lines of a matrix, [lines, bytes].
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        comm: Comm,
        policy: ShardingPolicy,
        *,
        dims: Mapping[str, int],
        double: bool,
        axes: tuple[str, ...],
        stage: int,
        num_stages: int,
    ) -> None:
        self.dims = {name: dims[name] for name in params}
        self.double = double
        self.packed: dict[str, Tensor] = {}
        super().__init__(params, comm, policy, axes=axes, stage=stage, num_stages=num_stages)

    @property
    def reshards(self) -> bool:
        """Always: the dequantized matrices are freed while no module uses them."""
        return True

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The bytes of this rank."""
        return (self._bytes,)

    def _flatten_params(self) -> None:
        parts: list[Tensor] = []
        for name, param in self.params.items():
            lines = pack(param.detach(), dim=self.dims[name], double=self.double)
            start, stop = self._own_lines(name)
            padding = self._lines_a_rank(name) - (stop - start)
            parts.append(F.pad(lines[start:stop], (0, 0, 0, padding)).flatten())
        self._bytes = torch.cat(parts)
        for name, part in zip(self.params, self._bytes.split(list(map(len, parts))), strict=True):
            start, stop = self._own_lines(name)
            self.packed[name] = part.view(self._lines_a_rank(name), -1)[: stop - start]
        self.unsharded_params = FlatParams(self.params, self.layout, dtype=self.policy.compute)
        self.reshard()

    def _num_lines(self, name: str) -> int:
        return self.params[name].shape[1 - self.dims[name]]

    def _lines_a_rank(self, name: str) -> int:
        return -(-self._num_lines(name) // self.layout.num_shards)

    def _own_lines(self, name: str) -> tuple[int, int]:
        """The lines of this rank: first, and behind the last."""
        size, num_lines = self._lines_a_rank(name), self._num_lines(name)
        start = min(self.index * size, num_lines)
        return start, min(start + size, num_lines)

    def start_all_gather(self) -> None:
        """Start the all-gather of the bytes, where other ranks hold other lines."""
        # The matrices themselves get memory in `unshard`, when the bytes are there: a prefetch holds only these.
        if self._gathering is None and self.is_sharded:
            num_bytes = len(self._bytes)
            gathered = self._bytes.new_empty(self.layout.num_shards * num_bytes)
            gathered[self.index * num_bytes :][:num_bytes] = self._bytes
            with self._names_in_errors():
                self._gathering = self.comm.start_all_gather_(gathered, self.axes)

    @torch.no_grad()
    def unshard(self) -> None:
        """Have the dequantized matrices allocated and filled."""
        params = self.unsharded_params
        if params is None or params.is_allocated:
            return
        self.start_all_gather()
        gathered = self._bytes
        if self._gathering is not None:
            with self._names_in_errors():
                gathered = self._gathering.wait()
            self._gathering = None
        params.allocate()
        dequantize_into(params.alias(), gathered, self)

    def lines_of(self, gathered: Tensor) -> Iterator[Tensor]:
        """The whole lines of each matrix among the bytes of all ranks."""
        of_ranks = gathered.view(self.layout.num_shards, -1)
        start = 0
        for name, packed in self.packed.items():
            width = packed.shape[1]
            stop = start + self._lines_a_rank(name) * width
            yield of_ranks[:, start:stop].reshape(-1, width)[: self._num_lines(name)]
            start = stop

    def gather_params(self) -> dict[str, Tensor]:
        """The values by parameter name, unsharded, in new memory; a collective over `axes`."""
        self.unshard()
        found = {name: param.detach().clone() for name, param in self.params.items()}
        self.reshard()
        return found

    # in checkpoints

    def dequantized(self, name: str) -> Tensor:
        """This rank's lines of a matrix, in float32, in the shape of `shard_of_lines`."""
        return unpack(self.packed[name], dim=self.dims[name], double=self.double)

    def shard_of_lines(self, matrix: ParamShard) -> ParamShard:
        """The geometry of this rank's lines of a matrix, from that of the matrix."""
        line_dim = 1 - self.dims[matrix.name]
        start, stop = self._own_lines(matrix.name)
        boxes: list[Box] = []
        first = 0
        for box in matrix.shard.boxes:  # several lie one after the other, in lines or beside them
            lo, num_lines = box.lo[line_dim], box.shape[line_dim]
            own_lo = lo + min(max(start - first, 0), num_lines)
            own_hi = lo + min(max(stop - first, 0), num_lines)
            if matrix.shard.dim == line_dim:
                first += num_lines
            if own_lo < own_hi:
                lows, highs = (
                    with_length(corner, line_dim, end)
                    for corner, end in ((box.lo, own_lo), (box.hi, own_hi))
                )
                boxes.append(Box(lows, highs))
        return replace(matrix, shard=Shard(tuple(boxes), matrix.shard.dim))

    def shard_of_bytes(self, matrix: ParamShard) -> ParamShard:
        """The geometry of `packed`: lines one below the other; where tensor parallelism cuts them, the
        codes of this rank's blocks, then their scales.
        """
        dim = self.dims[matrix.name]
        length = matrix.shape[dim]
        shape = (matrix.shape[1 - dim], packed_width(length, double=self.double))
        lines = self.shard_of_lines(matrix).shard
        rows = [(box.lo[1 - dim], box.hi[1 - dim]) for box in lines.boxes]
        if all(box.shape[dim] == length for box in lines.boxes):
            whole = tuple(Box((lo, 0), (hi, shape[1])) for lo, hi in rows)
            return replace(matrix, shape=shape, shard=Shard(whole))
        of_boxes = (
            bytes_of_blocks(length, box.lo[dim], box.hi[dim], double=self.double)
            for box in lines.boxes
        )
        boxes = tuple(
            Box((lo, part.start), (hi, part.stop))
            for parts in zip(*of_boxes, strict=True)
            for (lo, hi), part in zip(rows, parts, strict=True)
        )
        return replace(matrix, shape=shape, shard=Shard(boxes, 1))


def dequantize_into(flat: Tensor, gathered: Tensor, group: QuantizedGroup) -> None:
    """Write the matrices of a group, end to end, from the bytes of all ranks."""
    views = group.layout.views(flat)
    for (name, matrix), lines in zip(views.items(), group.lines_of(gathered), strict=True):
        unpack_into(matrix, lines, dim=group.dims[name], double=group.double)
