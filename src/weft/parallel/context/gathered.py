"""Owns attention to gathered keys and values: one collective brings those of all ranks, another their gradients home."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.parallel.context.pair import Pair


@dataclass(frozen=True)
class Gathered:
    """The route where every rank gathers all keys and values; as many bytes as the ring's, in one operation.

    They are gathered again for the backward, so that between the two a rank keeps its own part only.
    Source: Grattafiori et al. 2024 (LLaMA 3), section 3.3.2.
    """

    comm: Comm
    axis: Axis

    @property
    def index(self) -> int:
        """This rank's place."""
        return self.comm.index(self.axis)

    def pieces(self, own: Pair) -> Iterator[tuple[int, Pair]]:
        """Own keys and values while the others' come."""
        degree, work = self.comm.degree(self.axis), self.comm.start_all_gather(own.line, self.axis)
        yield self.index, own
        lines = work.wait().chunk(degree)
        for source in range(degree):
            if source != self.index:
                yield source, own.shaped(lines[source])

    def sum(self, own: Pair, dtype: torch.dtype) -> GatheredSum:
        """Gradients of everybody's keys and values side by side."""
        return GatheredSum(self, own, dtype)


class GatheredSum:
    """What this rank finds for all ranks, until it is reduced and scattered."""

    def __init__(self, route: Gathered, own: Pair, dtype: torch.dtype) -> None:
        self.route, self.own = route, own
        degree = route.comm.degree(route.axis)
        self.line = torch.zeros(degree * own.line.numel(), dtype=dtype, device=own.line.device)
        self.pieces = [own.shaped(line) for line in self.line.chunk(degree)]

    def add(self, source: int, columns: slice, dk: Tensor, dv: Tensor) -> None:
        """Add to the piece of rank `source`."""
        self.pieces[source].add(columns, dk, dv)

    def finish(self) -> Pair:
        """The sum over all ranks for this rank's own piece."""
        return self.own.shaped(self.route.comm.reduce_scatter(self.line, self.route.axis))
