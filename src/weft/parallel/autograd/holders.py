"""The ranks that hold the entries of a parameter of a tensor-parallel layer, and which entries each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.axes import span, span_sizes


class Holders(NamedTuple):
    """The ranks that hold the entries of a parameter: those along `axes`, each a `span` of each of the
    parts that dim `dim` of the whole parameter consists of: one, or fused projections.
    """

    comm: Comm
    axes: tuple[str, ...]
    dim: int
    parts: tuple[int, ...]

    @property
    def length(self) -> int:
        """Entries of the dim in the whole parameter."""
        return sum(self.parts)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Bounds of this rank's entries of each part, in the whole dim."""
        degree, index = self.comm.degree(self.axes), self.comm.index(self.axes)
        found: list[tuple[int, int]] = []
        offset = 0
        for part in self.parts:
            start, stop = span(part, degree, index)
            found.append((offset + start, offset + stop))
            offset += part
        return tuple(found)

    def whole_shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole parameter, of that of this rank's part."""
        return (*own[: self.dim], self.length, *own[self.dim + 1 :])

    def own_part(self, whole: Tensor) -> Tensor:
        """This rank's entries of the whole parameter."""
        spans = [whole.narrow(self.dim, start, stop - start) for start, stop in self.spans]
        return spans[0] if len(spans) == 1 else torch.cat(spans, self.dim)

    def gathered(self, own: Tensor) -> Tensor:
        """The whole parameter, of the entries of every rank; a collective."""
        degree = self.comm.degree(self.axes)
        of_parts = own.split(self.own_sizes, self.dim)
        whole = [
            self.comm.all_gather(
                each.contiguous(), self.axes, dim=self.dim, sizes=span_sizes(part, degree)
            )
            for part, each in zip(self.parts, of_parts, strict=True)
        ]
        return whole[0] if len(whole) == 1 else torch.cat(whole, self.dim)

    @property
    def own_sizes(self) -> tuple[int, ...]:
        """Entries of each part that this rank holds."""
        return tuple(stop - start for start, stop in self.spans)


def holders_of(tensor: Tensor) -> Holders | None:
    """Who holds the other entries of a parameter of a sharded layer; None of others."""
    found = getattr(tensor, "holders", None)  # a wrapper's shard has taken it from the parameter
    return found if isinstance(found, Holders) else None


def shard_axes_of(param: Tensor) -> tuple[str, ...]:
    """The mesh axes along which ranks hold other entries of a parameter; none for plain ones."""
    holders = holders_of(param)
    return () if holders is None else holders.axes
