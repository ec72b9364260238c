"""Places of a shard's entries in the whole activation, dim by dim, on which their random numbers depend. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from weft.core.sequence import zigzag


@dataclass(frozen=True)
class DimShard:
    """How a dim of an activation is sharded.

    Attributes:
        columns: whether it counts the positions of sequences, which context parallelism shards.
        sharded: whether tensor-parallel ranks hold different entries of it.
        parts: local lengths of the parts of a `Stacked` dim; none: it is one part.
    """

    columns: bool = False
    sharded: bool = False
    parts: tuple[int, ...] = ()


WHOLE = DimShard()


@dataclass(frozen=True)
class ShardingRank:
    """Where a rank is among those that share activations.

    Attributes:
        context_index, context_degree: among those that share each sequence.
        tensor_index, tensor_degree: among those that shard features, or with sequence parallelism
            positions.
    """

    context_index: int = 0
    context_degree: int = 1
    tensor_index: int = 0
    tensor_degree: int = 1


ONE_DEVICE = ShardingRank()


@dataclass(frozen=True)
class DimEntries:
    """The entries of one dim that a rank holds.

    Attributes:
        spans: consecutive entries of the whole dim, in the rank's order.
        length: of the whole dim.
    """

    spans: tuple[range, ...]
    length: int

    @staticmethod
    def whole(length: int) -> DimEntries:
        """All entries of a dim."""
        return DimEntries((range(length),), length)

    def select(self, chosen: slice) -> DimEntries:
        """Some of the entries."""
        entries = list(chain.from_iterable(self.spans))[chosen]
        return DimEntries(tuple(_consecutive(entries)), self.length)


def _consecutive(entries: list[int]) -> Iterator[range]:
    """Runs of consecutive entries."""
    start = 0
    for place in range(1, len(entries) + 1):
        if place == len(entries) or entries[place] != entries[place - 1] + 1:
            yield range(entries[start], entries[place - 1] + 1)
            start = place


def held_entries(dim: DimShard, num_local: int, rank: ShardingRank) -> DimEntries:
    """The entries that a rank holds of a dim of which it has `num_local`."""
    if dim.columns:
        return _columns(dim, num_local, rank)
    if not dim.sharded:
        return DimEntries.whole(num_local)
    spans: list[range] = []
    first_of_part = 0
    for size in dim.parts or (num_local,):
        start = first_of_part + rank.tensor_index * size
        spans.append(range(start, start + size))
        first_of_part += size * rank.tensor_degree
    return DimEntries(tuple(spans), first_of_part)


def _columns(dim: DimShard, num_local: int, rank: ShardingRank) -> DimEntries:
    """Columns: those of the context-parallel rank, of which sequence parallelism leaves a part."""
    num_of_context_rank = num_local * (rank.tensor_degree if dim.sharded else 1)
    length = num_of_context_rank * rank.context_degree
    spans = zigzag(length, rank.context_degree, rank.context_index)
    if not dim.sharded:
        return DimEntries(spans, length)
    start = rank.tensor_index * num_local
    own = list(islice(chain.from_iterable(spans), start, start + num_local))
    return DimEntries(tuple(_consecutive(own)), length)
