"""Types of tensors by the memory that they view: a view made anew, a saved tensor and a flat buffer find what was noted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weft.parallel.tensor.dims import DimFactor, is_sharded
from weft.planner.certificate.axis_types import AxisType, Types, flattened, of_dims, replicated

ViewKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides of a view of a storage; the stride of a dim of one entry is 1."""


@dataclass(frozen=True, slots=True)
class TypedPiece:
    """Entries `start` to `stop` of a flat buffer, and their types."""

    start: int
    stop: int
    types: Types

    @property
    def numel(self) -> int:
        """Number of entries."""
        return self.stop - self.start


def _key(tensor: Tensor) -> ViewKey:
    shape, strides = tensor.shape, tensor.stride()
    if 1 in shape:
        strides = tuple(
            stride if size > 1 else 1 for size, stride in zip(shape, strides, strict=True)
        )
    return int(tensor.storage_offset()), shape, strides


def _span(key: ViewKey) -> tuple[int, int]:
    """First entry of a view's memory, and the one behind its last."""
    offset, shape, strides = key
    if 0 in shape:
        return offset, offset
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return offset, offset + reach + 1


def _are_apart(one: ViewKey, other: ViewKey) -> bool:
    """Whether two views with the same strides share no entry, as the parts of a split do not."""
    if one[2] != other[2]:
        return False
    boxes = _box(one), _box(other)
    pairs = zip(*boxes, strict=True) if all(boxes) else ()
    return any(a.stop <= b.start or b.stop <= a.start for a, b in pairs)


def _box(key: ViewKey) -> tuple[range, ...]:
    """Where a view lies in each dim of the memory that its strides describe; () where its rows do
    not lie one after the other, or go over their ends.
    """
    rest, shape, strides = key
    found: list[range] = []
    behind = math.inf
    for size, stride in zip(shape, strides, strict=True):
        if not 0 < stride <= behind:
            return ()
        start, rest = divmod(rest, stride)
        if (start + size) * stride > behind:
            return ()
        found.append(range(start, start + size))
        behind = stride
    return tuple(found)


class TensorTypes:
    """Types of tensors. Storages with a type are kept, so that their addresses stay their own: on
    the meta device they have no memory.
    """

    def __init__(self) -> None:
        self._views: dict[int, dict[ViewKey, Types]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._fixed: set[int] = set()

    def fix(self, tensor: Tensor, types: Types) -> None:
        """Note types that no write to the tensor's memory changes: those of a parameter, which is
        gathered again and again.
        """
        self.set(tensor, types)
        self._fixed.add(tensor.untyped_storage()._cdata)

    def find(self, tensor: Tensor) -> Types | Literal["mixed"] | None:
        """The types that were noted for a tensor: for this view of its memory, or for the entries
        that it holds, in one piece; "mixed" for a flat buffer of entries with several types.
        """
        views = self._of(tensor)
        if not views:
            return None
        key = _key(tensor)
        known = views.get(key)
        if known is not None:
            return known
        pieces = self.pieces(tensor)
        kinds = {tuple(each.kind for each in piece.types) for piece in pieces}
        if len(kinds) != 1:
            return "mixed"
        found = views[key] = flattened(pieces[0].types, tensor.numel())
        return found

    def is_mixed(self, tensor: Tensor) -> bool:
        """Whether it is a flat buffer of entries with several types."""
        return self.find(tensor) == "mixed"

    def set(self, tensor: Tensor, types: Types) -> None:
        """Note the types of a new tensor, or of a view of one."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        self._kept[address] = storage
        views = self._views.setdefault(address, {})
        views[_key(tensor)] = types

    def write(self, tensor: Tensor, types: Types) -> None:
        """Note that a tensor was written: other views of the same entries have these types, too."""
        if tensor.untyped_storage()._cdata in self._fixed:
            return
        views = self._of(tensor) or {}
        key = _key(tensor)
        start, stop = _span(key)
        for other in list(views):
            other_start, other_stop = _span(other)
            if other_stop <= start or other_start >= stop or other == key:
                continue
            if _are_apart(other, key):
                continue
            old = views.pop(other)
            if other[2] == (1,):
                for left, right in ((other_start, start), (stop, other_stop)):
                    if left < right:
                        views[left, (right - left,), (1,)] = flattened(old, right - left)
            elif len(other[1]) == len(key[1]) and _is_around(other, key):
                views[other] = _widened(types, other[1], old)
            elif _is_inside(key, other) and all(map(_may_be_in, types, old)):
                views[other] = _widened(types, other[1], old)  # such as x[:, 0] = 1
            elif _is_inside(key, other) and (placed := _placed(types, key, old, other)):
                views[other] = placed  # such as x[:, 0] = y
        self.set(tensor, types)

    def pieces(self, tensor: Tensor) -> list[TypedPiece]:
        """What is known of the entries of a contiguous tensor, counted from its first one, in order."""
        first, behind = _span(_key(tensor))
        found: dict[tuple[int, int], TypedPiece] = {}
        for key, types in (self._of(tensor) or {}).items():
            start, stop = _span(key)
            start, stop = max(start, first), min(stop, behind)
            if start < stop:
                found[start, stop] = TypedPiece(
                    start - first, stop - first, flattened(types, stop - start)
                )
        return list(_disjoint(sorted(found.values(), key=lambda piece: (piece.start, -piece.stop))))

    def set_pieces(self, tensor: Tensor, pieces: list[TypedPiece]) -> None:
        """Note the types of the entries of a flat buffer."""
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor
        for piece in pieces:
            self.write(flat[piece.start : piece.stop], piece.types)

    def _of(self, tensor: Tensor) -> dict[ViewKey, Types] | None:
        return self._views.get(tensor.untyped_storage()._cdata)


def _is_around(outer: ViewKey, inner: ViewKey) -> bool:
    """Whether a view of as many dims holds the entries of another one and more."""
    start, stop = _span(outer)
    inner_start, inner_stop = _span(inner)
    return outer[2] == inner[2] and start <= inner_start and inner_stop <= stop


def _is_inside(inner: ViewKey, outer: ViewKey) -> bool:
    """Whether the memory of a view holds that of another one and more."""
    start, stop = _span(outer)
    inner_start, inner_stop = _span(inner)
    return (
        start <= inner_start and inner_stop <= stop and (start, stop) != (inner_start, inner_stop)
    )


def _may_be_in(new: AxisType, old: AxisType) -> bool:
    """Whether a tensor has a type after some of its entries were written: constants fit all but sums,
    into which zeros are written.
    """
    if old.kind == "partial":
        return new.kind in ("partial", "zero")
    return new.is_same_everywhere and (old.kind == "sharded" or old.is_same_everywhere)


def _widened(types: Types, shape: tuple[int, ...], old: Types) -> Types:
    """The types of a tensor of which a part was written: those of the part, where they say more than
    that all ranks hold the same.
    """
    found = []
    for new, before in zip(types, old, strict=True):
        if new.is_same_everywhere:
            found.append(before if not before.is_same_everywhere else replicated(shape))
        elif new.kind == "sharded":
            shards = map(is_sharded, new.dims)
            dims = [
                (DimFactor(size, is_shard),) for size, is_shard in zip(shape, shards, strict=True)
            ]
            found.append(of_dims(tuple(dims)))
        else:
            found.append(new)
    return tuple(found)


def _place_of(size: int, stride: int, outer: ViewKey) -> int | None:
    """The dim of a view that steps over entries as a dim of a part of it does."""
    alike = [
        at
        for at, (own, step) in enumerate(zip(outer[1], outer[2], strict=True))
        if step == stride and own >= size
    ]
    return alike[0] if len(alike) == 1 else None


def _placed(types: Types, inner: ViewKey, old: Types, outer: ViewKey) -> Types | None:
    """The types of a tensor, of zeros or sharded alike, into a part of whose dims sharded entries were
    written; None where it is another one.
    """
    _, shape, strides = inner
    found_places = [_place_of(*dim, outer) for dim in zip(shape, strides, strict=True)]
    places = [at for at in found_places if at is not None]
    if len(set(places)) < len(found_places):
        return None
    found: list[AxisType] = []
    for new, before in zip(types, old, strict=True):
        if _may_be_in(new, before):
            found += _widened((new,), outer[1], (before,))
            continue
        shards = {place for place, dim in zip(places, new.dims, strict=False) if is_sharded(dim)}
        placed = of_dims(
            tuple((DimFactor(size, at in shards),) for at, size in enumerate(outer[1]))
        )
        is_whole_shard = all(
            outer[1][at] == size for at, size in zip(places, shape, strict=True) if at in shards
        )
        if new.kind != "sharded" or before.kind not in ("zero", "sharded") or not is_whole_shard:
            return None
        if before.kind == "sharded" and before != placed:
            return None
        found.append(placed)
    return tuple(found)


def _disjoint(pieces: list[TypedPiece]) -> Iterator[TypedPiece]:
    """Pieces without those that lie in others."""
    behind = 0
    for piece in pieces:
        if piece.stop > behind:
            yield piece
            behind = piece.stop
