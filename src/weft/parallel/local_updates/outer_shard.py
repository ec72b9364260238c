"""Which entries of the trained parameters a rank exchanges with other sites: each entry of a site on one of its ranks.

Ranks of one site that hold the same entries (data parallelism, norms under tensor parallelism)
each take a part of them, so that an entry crosses the link between two sites once. Parameters that
two pipeline ranks hold (tied embeddings) are exchanged by both, which get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.dimension import local_update_axes
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pp import AXIS as PP
from weft.parallel.zero.flat_params import FlatLayout
from weft.parallel.zero.gradient_reducer import GradientReducer


@dataclass(frozen=True)
class OuterPiece:
    """Entries of one parameter that this rank exchanges.

    Attributes:
        name: of the parameter.
        start, stop: their range in this rank's shard of the parameter, row by row.
        in_flat: their place in the rank's flat tensor of exchanged entries.
        boxes: the entries as boxes of the whole parameter, in order.
    """

    name: str
    start: int
    stop: int
    in_flat: slice
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class _ReplicaGroup:
    """Parameters of which the ranks along the same axes hold the same entries."""

    axes: tuple[str, ...]
    layout: FlatLayout
    index: int
    start: int

    @property
    def in_flat(self) -> slice:
        """Place of this rank's part in its flat tensor."""
        return slice(self.start, self.start + self.layout.shard_length)


class OuterShard:
    """The exchanged entries of one rank, as one flat tensor.

    Attributes:
        comm: of all sites.
        names: trained parameters of this rank, in their order.
        pieces: what the flat tensor consists of, besides padding.
        length: of the flat tensor.
        dtype: of the values that the inner optimizer updates.
    """

    def __init__(self, model: ParallelModel, reducer: GradientReducer) -> None:
        self.model = model
        self.comm: Comm = model.comm
        self._params = _trained(model, reducer)
        self.names = tuple(self._params)
        self.dtype = _dtype_of(self._params)
        self._groups = self._replica_groups(reducer)
        lengths = [group.layout.shard_length for group in self._groups]
        self.length = sum(lengths)
        pieces = self._pieces(reducer)
        self.pieces = tuple(pieces)

    def _replica_groups(self, reducer: GradientReducer) -> tuple[_ReplicaGroup, ...]:
        shapes_by_axes: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
        for name, tensor in self._params.items():
            axes = self._replica_axes(name, reducer)
            shapes = shapes_by_axes.setdefault(axes, {})
            shapes[name] = (tensor.numel(),)
        groups: list[_ReplicaGroup] = []
        start = 0
        for axes in sorted(shapes_by_axes):  # the same order on all ranks
            num_replicas = self.comm.degree(axes)
            layout = FlatLayout.of(shapes_by_axes[axes], num_replicas)
            group = _ReplicaGroup(axes, layout, index=self.comm.index(axes), start=start)
            groups.append(group)
            start += layout.shard_length
        return tuple(groups)

    def _replica_axes(self, name: str, reducer: GradientReducer) -> tuple[str, ...]:
        """Axes inside a site along which ranks hold the same entries of a parameter."""
        distinct = {PP}
        distinct.update(self.model.shards[name].shard_axes)
        distinct.update(reducer.shard_axes[name])
        distinct.update(local_update_axes())
        return tuple(axis for axis in self.comm.mesh.wide_axes if axis not in distinct)

    def _pieces(self, reducer: GradientReducer) -> Iterator[OuterPiece]:
        for group in self._groups:
            for span in group.layout.spans:
                overlap = group.layout.overlap(span, group.index)
                entries, place = overlap.in_param, overlap.in_shard
                if entries.start == entries.stop:
                    continue
                first, _ = reducer.shard_ranges[span.name]
                start = first + entries.start
                stop = first + entries.stop
                shard = self.model.shards[span.name].shard
                flat_start = group.start + place.start
                flat_stop = group.start + place.stop
                yield OuterPiece(
                    name=span.name,
                    start=start,
                    stop=stop,
                    in_flat=slice(flat_start, flat_stop),
                    boxes=shard.boxes_of_range(start, stop),
                )

    def values(self) -> Tensor:
        """The present values of the exchanged entries, in new memory; padding is 0."""
        parts = []
        for group in self._groups:
            part = group.layout.pack_shard(
                self._params, group.index, dtype=self.dtype, device=self.comm.device
            )
            parts.append(part)
        return torch.cat(parts) if parts else self.zeros()

    def zeros(self) -> Tensor:
        """A flat tensor of zeros."""
        return torch.zeros(self.length, dtype=self.dtype, device=self.comm.device)

    @torch.no_grad()
    def write(self, flat: Tensor, *, local_share: float) -> None:
        """Set the parameters of this rank to `local_share` of their present values and the rest of
        the entries that the ranks of its site hold in `flat`; every rank of the site must call it.
        """
        for group in self._groups:
            layout = group.layout
            whole = flat.new_zeros(layout.length)
            own = layout.shard_slice(group.index)
            whole[own] = flat[group.in_flat]
            self.comm.all_gather_(whole, group.axes)
            for name, values in layout.views(whole).items():
                param = self._params[name]
                if local_share:
                    kept = local_share * param
                    values = kept + (1 - local_share) * values
                param.copy_(values)


def _trained(model: ParallelModel, reducer: GradientReducer) -> dict[str, Tensor]:
    """The values that the optimizer updates on this rank, flat."""
    found = {}
    for name, tensor in reducer.sharded_params.items():
        if model.params[name].requires_grad:
            # The optimizer's own memory, so that `write` sets what it will update.
            found[name] = tensor.detach().view(-1)
    return found


def _dtype_of(params: Mapping[str, Tensor]) -> torch.dtype:
    for tensor in params.values():
        return tensor.dtype
    return torch.float32
