"""Sums of the gradients that ranks compute of their own tokens: over which mesh axes they give the right gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.prove.bounds import Bounds
from weft.prove.places import ShardPlace
from weft.prove.record import RankRecord
from weft.prove.reference_trace import TensorKey


@dataclass(frozen=True)
class GradientSums:
    """The gradients of all ranks before their reduction."""

    mesh: Mesh
    records: Sequence[RankRecord]
    bounds: Bounds

    def right_axes(self, step: int, name: str, rank: int) -> tuple[str, ...] | None:
        """The axes over which the ranks' own gradients add up to the right one; None: there are none."""
        param = self.records[rank].shards[name]
        key = TensorKey.of_gradient(step, "backward", param.owner)
        whole = self.bounds.plain.values[key]
        expected = ShardPlace(param.shard).read(whole)
        assert expected is not None, "a shard lies in its parameter"
        for axes in (param.reduce_axes, *self.axis_sets()):
            total = self.sum_over(step, name, rank, axes)
            if total is None or total.shape != expected.shape:
                continue
            difference = self.bounds.relative(total, expected, key)
            if difference <= self.bounds.bound(key):
                return axes
        return None

    def axis_sets(self) -> list[tuple[str, ...]]:
        """All sets of axes along which gradients may be summed, small ones first."""
        pipeline = pipeline_axis()
        axes = [axis for axis in self.mesh.wide_axes if axis != pipeline]
        most = len(axes)
        found: list[tuple[str, ...]] = []
        for number in range(most + 1):
            found.extend(itertools.combinations(axes, number))
        return found

    def sum_over(self, step: int, name: str, rank: int, axes: tuple[str, ...]) -> Tensor | None:
        """The sum of the ranks' own gradients over these axes; None where they have none of one
        shape.
        """
        parts: list[Tensor] = []
        for member in self.mesh.group(rank, axes):
            record = self.records[member]
            partial = record.partial_gradients.get((step, name))
            if partial is None:
                return None
            if parts and parts[0].shape != partial.value.shape:
                return None
            parts.append(partial.value)
        return torch.stack(parts).sum(0)
