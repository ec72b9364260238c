"""Owns the flat memory of a unit: parameters that are gathered, reduced and updated together, end to end in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its unit's flat memory: entries `lo` to `hi`."""

    name: str
    shape: tuple[int, ...]
    lo: int
    hi: int


@dataclass(frozen=True)
class FlatLayout:
    """Parameters end to end, padded so that `parts` ranks hold equal shards.

    Attributes:
        slots: in memory order.
        length: entries with the padding at the end.
        parts: number of shards.
    """

    slots: tuple[Slot, ...]
    length: int
    parts: int

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], parts: int) -> FlatLayout:
        """Lay out tensors of these shapes, in this order."""
        slots, lo = [], 0
        for name, shape in shapes.items():
            hi = lo + torch.Size(shape).numel()
            slots.append(Slot(name, shape, lo, hi))
            lo = hi
        return FlatLayout(tuple(slots), -(-lo // parts) * parts, parts)

    @property
    def shard_length(self) -> int:
        """Entries of one shard."""
        return self.length // self.parts

    def shard_range(self, index: int) -> slice:
        """Which entries of the flat memory shard `index` holds."""
        return slice(index * self.shard_length, (index + 1) * self.shard_length)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's part of `flat`, in its shape."""
        return {slot.name: flat[slot.lo : slot.hi].view(slot.shape) for slot in self.slots}

    def cut(self, slot: Slot, index: int) -> tuple[slice, slice]:
        """Which entries of a parameter, flattened, lie in shard `index`, and where they lie there; there may be none."""
        start = index * self.shard_length
        end = start + self.shard_length
        lo = min(max(slot.lo, start), end)
        hi = max(min(slot.hi, end), lo)
        return slice(lo - slot.lo, hi - slot.lo), slice(lo - start, hi - start)

    def shard_views(self, shard: Tensor, index: int) -> dict[str, Tensor]:
        """Each parameter's entries in shard `index`, one-dimensional; there may be none."""
        return {slot.name: shard[self.cut(slot, index)[1]] for slot in self.slots}

    def pack_shard(
        self, tensors: Mapping[str, Tensor], index: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Shard `index` of the flat tensor of `tensors`, without making the whole."""
        shard = torch.zeros(self.shard_length, dtype=dtype, device=device)
        for slot in self.slots:
            theirs, ours = self.cut(slot, index)
            shard[ours] = tensors[slot.name].detach().reshape(-1)[theirs]
        return shard

    def pack(self, tensors: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor of `tensors`; entries of parameters that are not given, and the padding, are 0."""
        flat = torch.zeros(self.length, dtype=dtype, device=device)
        for slot in self.slots:
            if slot.name in tensors:
                flat[slot.lo : slot.hi] = tensors[slot.name].detach().reshape(-1)
        return flat


class FlatParams:
    """The parameters of a unit as views into one flat tensor whose memory can be given away and taken back.

    Note [Memory that comes back]
        A parameter that autograd has saved for the backward keeps its storage object. Giving the memory away is to resize
        that storage to nothing; before the backward it is resized back and filled with the same values, and every saved
        view is valid again. Filling goes through an alias with a version counter of its own, so that autograd does not
        take it for a change of the saved tensors.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], layout: FlatLayout, *, dtype: torch.dtype) -> None:
        first = next(iter(params.values()))
        self.flat = layout.pack(params, dtype=dtype, device=first.device)
        self._num_bytes = self.flat.untyped_storage().nbytes()
        for name, view in layout.views(self.flat).items():
            params[name].data = view

    @property
    def is_there(self) -> bool:
        """Whether the memory is held."""
        return self.flat.untyped_storage().nbytes() > 0

    def release(self) -> None:
        """Give the memory away."""
        self.flat.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Take memory back; its values are undefined until `alias` has been filled."""
        if not self.is_there:
            self.flat.untyped_storage().resize_(self._num_bytes)

    def alias(self) -> Tensor:
        """The same memory as a tensor that autograd does not watch."""
        return self.flat.new_empty(0).set_(self.flat.untyped_storage(), 0, self.flat.shape, self.flat.stride())
