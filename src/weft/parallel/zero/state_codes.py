"""Optimizer states in 8 bits: codes of entries, the largest absolute value of each block, blocks cut by shards.

Note [Blocks of states]
    A state of a parameter is stored as a code of one byte for each entry, and the largest absolute
    value of each block, float32. A block is `length` entries of a row (the last one of a row may be
    shorter), by their place in the whole parameter: the same blocks on one device and under every
    layout. A rank holds the codes of its entries, and the largest values of all blocks that these
    lie in. Where a shard ends within a block, several boxes have entries of it, and the largest
    value is the maximum over them; which blocks these are follows from the boxes of all ranks.

Note [Codes of states]
    Values are relative to the largest of their block, and the codes are whole numbers k of a root:

        int8      sign(k) (k / 127)^2     k = -127 ... 127
        uint8     (k / 255)^4             k = 1 ... 255, of states that are never negative

    A step is the first moment over the root of the second: both maps are squares in its units. The
    largest entry of a block is 1 exactly, so decoded states encode to themselves. Values next to
    each other differ by 2/k of themselves (in the root of a second moment, too): by 1.6 and 0.8% at
    the largest entry, 5 and 2.5% at a tenth of it. The dynamic exponents of Dettmers et al. (2021)
    have 1.4 and 0.35% there, 14 and 3.5% above a tenth, and need a search or a table, where a root is
    one instruction. A second moment is never rounded to 0: a step would be divided by `eps` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.comm import Comm
from weft.core.axes import Box, blocks_of
from weft.parallel.zero.param_entries import ParamEntries

ABSMAX = "_absmax"
"""Ends the key of the largest values: "exp_avg", "exp_avg_absmax"."""
SIGNED, UNSIGNED = torch.int8, torch.uint8


def codes_of(relative: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of values from -1 to 1 or, unsigned, from 0 to 1."""
    if dtype == SIGNED:
        return relative.abs().sqrt_().mul_(127).round_().copysign_(relative).to(dtype)
    return relative.sqrt().sqrt_().mul_(255).round_().clamp_(min=1).to(dtype)


def values_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes stand for, from -1 to 1."""
    if codes.dtype == SIGNED:
        root = codes.to(dtype).div_(127)
        return root.abs().mul_(root)
    return codes.to(dtype).div_(255).square_().square_()


@dataclass(frozen=True)
class StateBlocks:
    """The blocks of one parameter on one rank.

    Attributes:
        entries: of the parameter on this rank.
        length: entries of a block.
    """

    entries: ParamEntries
    length: int

    @staticmethod
    def of(entries: ParamEntries, length: int) -> StateBlocks:
        """Blocks of at most `length` entries; those of shorter rows are whole rows."""
        return StateBlocks(entries, min(length, entries.shape[-1]))

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """For each box of entries, its blocks."""
        return tuple(blocks_of(box, self.length) for box in self.entries.own_boxes)

    @property
    def num_blocks(self) -> int:
        """Blocks of this rank; one that two of its boxes have entries of counts twice."""
        return sum(box.size for box in self.boxes)

    @cached_property
    def cut(self) -> Tensor:
        """Blocks of which more than one box of any rank has entries, by their number in the whole
        parameter, ascending.
        """
        found = [torch.zeros(0, dtype=torch.int64)]
        for index in range(self.entries.num_holders):
            for box in self.entries.boxes_at(index):
                found.extend(map(self._numbers, self._cut(box)))
        distinct: Tensor = torch.cat(found).unique()
        return distinct

    @cached_property
    def own_cut(self) -> tuple[Tensor, Tensor]:
        """Places of this rank's cut blocks among its own blocks, and in `cut`."""
        numbers = [self._numbers(box) for box in self.boxes] if len(self.cut) else []
        own = torch.cat([torch.zeros(0, dtype=torch.int64), *numbers])
        places = torch.isin(own, self.cut).nonzero().flatten()
        return places, torch.searchsorted(self.cut, own[places])

    def _cut(self, box: Box) -> Iterator[Box]:
        """The blocks of which a box has only some entries: the first and the last of its rows."""
        blocks = blocks_of(box, self.length)
        row, start, stop = self.entries.shape[-1], box.lo[-1], box.hi[-1]
        columns = set()
        if start % self.length:
            columns.add(blocks.lo[-1])
        if stop % self.length and stop != row:
            columns.add(blocks.hi[-1] - 1)
        for column in columns:
            yield Box((*blocks.lo[:-1], column), (*blocks.hi[:-1], column + 1))

    def _numbers(self, blocks: Box) -> Tensor:
        """The numbers of these blocks in the whole parameter."""
        shape = (*self.entries.shape[:-1], -(-self.entries.shape[-1] // self.length))
        numbers = torch.zeros(1, dtype=torch.int64)
        for size, start, stop in zip(shape, blocks.lo, blocks.hi, strict=True):
            of_dim = torch.arange(start, stop, dtype=torch.int64)
            numbers = (numbers[:, None] * size + of_dim).flatten()
        return numbers

    def absmax(self, values: Tensor) -> Tensor:
        """The largest absolute value of this rank's entries in each of its blocks, float32."""
        found = [values.new_zeros(0)]
        for box, entries in self.entries.views(values):
            rows = self._in_blocks(box, entries)
            largest = rows.abs().amax(-1)
            found.append(largest.flatten())
        return torch.cat(found).float()

    def encode(self, values: Tensor, absmax: Tensor, codes: Tensor) -> None:
        """Write the codes of values whose blocks have these largest values."""
        # 16 bits would round the quotient to other codes.
        dtype = torch.promote_types(values.dtype, torch.float32)
        places = self.entries.views(codes)
        for (box, entries), (_, target), largest in zip(
            self.entries.views(values), places, self._of_boxes(absmax), strict=True
        ):
            scale = largest.where(largest > 0, 1.0).to(dtype).unsqueeze(-1)
            relative = self._in_blocks(box, entries).to(dtype) / scale
            target.copy_(self._in_rows(box, codes_of(relative, codes.dtype)))

    def decode(self, codes: Tensor, absmax: Tensor, *, dtype: torch.dtype) -> Tensor:
        """The values of codes, of their shape."""
        precise = torch.promote_types(dtype, torch.float32)
        result = torch.empty_like(codes, dtype=dtype)
        for (box, entries), (_, target), largest in zip(
            self.entries.views(codes),
            self.entries.views(result),
            self._of_boxes(absmax),
            strict=True,
        ):
            relative = self._in_blocks(box, values_of(entries, precise))
            scaled = relative * largest.to(precise).unsqueeze(-1)
            target.copy_(self._in_rows(box, scaled))
        return result

    def _of_boxes(self, absmax: Tensor) -> Iterator[Tensor]:
        """The largest values of each box, in its shape."""
        parts = absmax.split([box.size for box in self.boxes])
        for part, box in zip(parts, self.boxes, strict=True):
            yield part.view(box.shape)

    def _in_blocks(self, box: Box, entries: Tensor) -> Tensor:
        """[..., blocks, length], with zeros for entries that the box does not have."""
        before, after = box.lo[-1] % self.length, -box.hi[-1] % self.length
        if before or after:
            entries = F.pad(entries, (before, after))
        return entries.reshape(*entries.shape[:-1], -1, self.length)

    def _in_rows(self, box: Box, blocks: Tensor) -> Tensor:
        """The entries of the box, without the zeros."""
        before = box.lo[-1] % self.length
        rows: Tensor = blocks.flatten(-2).narrow(-1, before, box.shape[-1])
        return rows


def join_cut_blocks(
    blocks: Sequence[StateBlocks],
    largest: Sequence[Tensor | None],
    *,
    comm: Comm | None,
    axes: tuple[str, ...],
) -> None:
    """Replace the largest values of cut blocks by those over all boxes that have entries; a collective
    over the axes if any block is cut.

    Args:
        blocks: of states, the same ones in the same order on every rank.
        largest: of the blocks of each state; None if this rank has no entries of it.
    """
    sizes = [len(each.cut) for each in blocks]
    if not sum(sizes):
        return
    assert comm is not None, "only shards cut blocks"
    device = comm.device
    joined = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    held = [
        (place, [places.to(device) for places in each.own_cut], absmax)
        for place, (each, absmax) in enumerate(zip(blocks, largest, strict=True))
        if absmax is not None
    ]
    parts = joined.split(sizes)
    for place, (own, among_cut), absmax in held:
        parts[place].scatter_reduce_(0, among_cut, absmax[own], "amax")
    parts = comm.all_reduce(joined, axes, op="max").split(sizes)
    for place, (own, among_cut), absmax in held:
        absmax[own] = parts[place][among_cut]
