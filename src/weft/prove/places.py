"""Where the tensor of a rank lies in the logical tensor: rows and columns of activations, boxes of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.core.axes import Box
from weft.core.dimension import activation_axes, position_axes, sequence_axes
from weft.core.mesh import Mesh
from weft.core.shard import Shard
from weft.layout.plan import Plan
from weft.parallel.model.parallelize import read_shard


class Place(Protocol):
    """A part of a logical tensor."""

    def read(self, whole: Tensor) -> Tensor | None:
        """What the rank should hold; None where the shapes do not fit together."""
        ...


@dataclass(frozen=True)
class Whole:
    """All of it."""

    def read(self, whole: Tensor) -> Tensor | None:
        """The tensor itself."""
        return whole


@dataclass(frozen=True)
class ShardPlace:
    """A parameter shard, in the shape that modules see."""

    shard: Shard

    def read(self, whole: Tensor) -> Tensor | None:
        """The entries of the shard."""
        return read_shard(lambda box: whole[box.slices], self.shard)


@dataclass(frozen=True)
class FlatPlace:
    """Boxes of a parameter, flattened one after the other."""

    boxes: tuple[Box, ...]

    def read(self, whole: Tensor) -> Tensor | None:
        """The entries of all boxes, one dimension."""
        if not whole.dim():
            return whole.reshape(1)
        return torch.cat([whole[box.slices].reshape(-1) for box in self.boxes])


@dataclass(frozen=True)
class MicroBatchPlace:
    """Rows and columns of one micro-batch of one rank, as the definition of the order says: sequence
    `(m D + d) micro + i` of a step is the i-th of micro-batch m of data rank d of D.

    Attributes:
        rows: sequences of the global batch.
        columns: positions of a sequence; None where samples have none.
        local_shape: shape that the rank holds.
        activation_index, activation_degree: place along the axis that may shard activations further.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...] | None
    local_shape: tuple[int, ...]
    activation_index: int
    activation_degree: int

    def read(self, whole: Tensor) -> Tensor | None:
        """The entries by rows and columns; a further sharded dim is recognised by its length."""
        if whole.dim() != len(self.local_shape):
            return None
        rows = list(self.rows)
        part = whole[rows]
        if self.columns is not None and part.dim() > 1:
            columns = list(self.columns)
            if part.shape[1] > max(columns):
                part = part[:, columns]
        for dim in range(1, part.dim()):
            part = self._chunk(part, dim)
        return part if tuple(part.shape) == self.local_shape else None

    def _chunk(self, part: Tensor, dim: int) -> Tensor:
        """This rank's chunk of a dim, where the rank holds less of it."""
        if part.shape[dim] == self.local_shape[dim]:
            return part
        chunks = part.tensor_split(self.activation_degree, dim)
        return chunks[self.activation_index]


@dataclass(frozen=True)
class RankPlaces:
    """Places of the tensors of one rank.

    Attributes:
        num_runs: runs of consecutive micro-batches, each of some data ranks: 1, or with sums in a
            fixed order the data ranks.
    """

    plan: Plan
    rank: int
    has_columns: bool
    num_runs: int = 1

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.plan.mesh

    def rows(self, micro_batch: int) -> tuple[int, ...]:
        """Sequences of the global batch in a micro-batch."""
        size = self.plan.micro_size
        num_data_ranks = self.mesh.degree(sequence_axes())
        data_rank = self.mesh.index(self.rank, sequence_axes())
        ranks_of_run = num_data_ranks // self.num_runs
        run, index = divmod(data_rank, ranks_of_run)
        sequences_of_run = self.plan.global_size // self.num_runs
        first_of_run = run * sequences_of_run
        num_before = (micro_batch * ranks_of_run + index) * size
        start = first_of_run + num_before
        return tuple(range(start, start + size))

    def columns(self) -> tuple[int, ...] | None:
        """Positions of every sequence: chunks `i` and `2c - 1 - i` of `2c` on rank i of c."""
        if not self.has_columns:
            return None
        length = self.plan.seq_len
        degree = self.mesh.degree(position_axes())
        if degree == 1:
            return tuple(range(length))
        num_chunks = 2 * degree
        chunk = length // num_chunks
        early = self.mesh.index(self.rank, position_axes())
        late = num_chunks - 1 - early
        columns: list[int] = []
        for index in (early, late):
            start = index * chunk
            columns.extend(range(start, start + chunk))
        return tuple(columns)

    def micro_batch(
        self, number: int, local_shape: Sequence[int], *, whole_columns: bool = False
    ) -> MicroBatchPlace:
        """The place of an activation, or a field of the batch, of this shape."""
        return MicroBatchPlace(
            rows=self.rows(number),
            columns=None if whole_columns else self.columns(),
            local_shape=tuple(local_shape),
            activation_index=self.mesh.index(self.rank, activation_axes()),
            activation_degree=self.mesh.degree(activation_axes()),
        )
