"""Which entries of a tensor a rank holds, and the ranks that hold the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis, axis_names
from weft.parallel.autograd.holders import Holders


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that hold the entries of a tensor.

    Attributes:
        axis: the mesh axes over which entries are sharded.
        holders: the ranks that hold other entries of the same parameter besides, of a tensor-parallel
            layer: sums and norms are taken over them, too.
    """

    comm: Comm
    axis: Axis
    holders: Holders | None = None

    def own_entries(self, whole: Tensor, entries: ShardEntries) -> Tensor:
        """This rank's entries of a tensor of the shape that scripts see, in new memory or a view."""
        if entries.of_layer is not None:
            assert self.holders is not None, "only layers have other ranks"
            whole = self.holders.own_part(whole)
        return whole.reshape(-1)[entries.own]

    def gathered(self, local: Tensor, entries: ShardEntries) -> Tensor:
        """The tensor that scripts see; a collective."""
        flat = self.comm.all_gather(local.contiguous(), self.axis, sizes=entries.sizes)
        whole = flat.view(entries.shape)
        if entries.of_layer is None:
            return whole
        assert self.holders is not None, "only layers have other ranks"
        return self.holders.gathered(whole)

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The mesh axes along which ranks hold other entries."""
        return (*axis_names(self.axis), *(self.holders.axes if self.holders else ()))

    def total(self, partial: Tensor) -> Tensor:
        """The sum over all ranks of a scalar; its gradient is that of this rank's part."""
        with torch.no_grad():
            total = self.comm.all_reduce(partial.detach().contiguous(), self.all_axes)
        return partial - partial.detach() + total if partial.requires_grad else total


@dataclass(frozen=True)
class ShardEntries:
    """Which entries of a tensor a rank holds: `starts[index]` to `starts[index + 1]`, counted row by row.

    Attributes:
        shape: of the tensor whose entries are counted.
        starts: of the entries of each rank, and the number of all entries.
        index: of this rank.
        of_layer: shape of the parameter of a tensor-parallel layer that this tensor is a part of, where
            scripts see all of that; the others are `ShardGroup.holders`'.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    index: int
    of_layer: tuple[int, ...] | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape that scripts see."""
        return self.shape if self.of_layer is None else self.of_layer

    @property
    def own(self) -> slice:
        """The entries of this rank."""
        return slice(self.starts[self.index], self.starts[self.index + 1])

    @property
    def sizes(self) -> list[int]:
        """The numbers of entries of the ranks."""
        return [stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False)]
