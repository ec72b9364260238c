"""Owns recipes: from which parts of which of their tensors one of ours is made, and so what is to be read for any box of it.

Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.core.axes import Box
from weft.hf.table import EXPERT, Row, Share

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Read:
    """Entries of one of their tensors, and where they go.

    Attributes:
        theirs: name of the tensor.
        box: entries, as they lie there.
        transposed: whether they are transposed on the way.
        at: index of a box in an array that holds just the box of ours that was asked for.
    """

    theirs: str
    box: Box
    transposed: bool
    at: tuple[slice, ...]


@dataclass(frozen=True)
class Recipe:
    """One of our tensors: a row of the table that is whole, the shape of each of their tensors in it, how many they are.

    Attributes:
        row: with whole names, but for `{expert}`.
        source: shape of their tensor; of each where experts are stacked.
        experts: number of tensors that are stacked; 0 where ours is no stack.
    """

    row: Row
    source: Shape
    experts: int = 0

    @property
    def theirs(self) -> tuple[str, ...]:
        """Names of their tensors, whole."""
        if not self.experts:
            return (self.row.theirs,)
        return tuple(self.row.theirs.replace(EXPERT, str(expert)) for expert in range(self.experts))

    @property
    def shape(self) -> Shape:
        """Of ours."""
        part = _part_shape(self.source, self.row.share)
        part = part[::-1] if self.row.transposed else part
        return (self.experts, *part) if self.experts else part

    def reads(self, box: Box) -> Iterator[Read]:
        """What is to be read for a box of ours."""
        if not self.experts:
            yield Read(self.row.theirs, self._at_source(box), self.row.transposed, ())
            return
        below = self._at_source(Box(box.lo[1:], box.hi[1:]))
        for place, expert in enumerate(range(box.lo[0], box.hi[0])):
            yield Read(
                self.row.theirs.replace(EXPERT, str(expert)), below, self.row.transposed, (slice(place, place + 1),)
            )

    def _at_source(self, box: Box) -> Box:
        """A box of ours as it lies in theirs."""
        turned = Box(box.lo[::-1], box.hi[::-1]) if self.row.transposed else box
        return turned if self.row.share is None else shifted(turned, share_start(self.source, self.row.share), +1)


def share_start(source: Shape, share: Share) -> Shape:
    """First entry of a share in their tensor."""
    length = source[share.dim] // share.parts
    return tuple(share.index * length if dim == share.dim else 0 for dim in range(len(source)))


def shifted(box: Box, by: Shape, sign: int) -> Box:
    """The box moved by so many entries in each dim."""
    move = tuple(sign * n for n in by)
    return Box(
        tuple(lo + n for lo, n in zip(box.lo, move, strict=True)),
        tuple(hi + n for hi, n in zip(box.hi, move, strict=True)),
    )


def _part_shape(source: Shape, share: Share | None) -> Shape:
    if share is None:
        return source
    return tuple(n // share.parts if dim == share.dim else n for dim, n in enumerate(source))
