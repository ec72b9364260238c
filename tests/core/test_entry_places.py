"""Places of a shard's entries: the shards of all ranks together are the whole dim, each entry once."""

from __future__ import annotations

import itertools

import pytest

from weft.core.entry_places import DimEntries, DimShard, ShardingRank, held_entries

LENGTH = 48


def entries(dim: DimShard, num_local: int, rank: ShardingRank) -> list[int]:
    held = held_entries(dim, num_local, rank)
    assert held.length == LENGTH
    return list(itertools.chain.from_iterable(held.spans))


@pytest.mark.parametrize("tensor_degree", [1, 2, 3])
@pytest.mark.parametrize("context_degree", [1, 2, 4])
def test_columns_of_all_ranks_are_those_of_the_sequence(
    context_degree: int, tensor_degree: int
) -> None:
    dim = DimShard(columns=True, sharded=tensor_degree > 1)
    num_local = LENGTH // context_degree // tensor_degree
    found: list[int] = []
    for context, tensor in itertools.product(range(context_degree), range(tensor_degree)):
        rank = ShardingRank(context, context_degree, tensor, tensor_degree)
        found += entries(dim, num_local, rank)
    assert sorted(found) == list(range(LENGTH))


def test_a_context_rank_holds_two_chunks() -> None:
    rank = ShardingRank(context_index=1, context_degree=2)
    assert held_entries(DimShard(columns=True), 4, rank) == DimEntries(
        (range(2, 4), range(4, 6)), 8
    )


def test_a_sequence_parallel_rank_holds_part_of_its_context_ranks_columns() -> None:
    second_half = ShardingRank(0, 2, tensor_index=1, tensor_degree=2)
    held = held_entries(DimShard(columns=True, sharded=True), 2, second_half)
    assert held == DimEntries((range(6, 8),), 8)


def test_parts_of_a_stacked_dim_are_sharded_one_by_one() -> None:
    dim = DimShard(sharded=True, parts=(2, 1))
    first, second = (held_entries(dim, 3, ShardingRank(0, 1, i, 2)) for i in range(2))
    assert first == DimEntries((range(2), range(4, 5)), 6)
    assert second == DimEntries((range(2, 4), range(5, 6)), 6)


def test_chosen_entries_are_runs() -> None:
    held = DimEntries((range(2), range(6, 8)), 8)
    assert held.select(slice(1, 3)) == DimEntries((range(1, 2), range(6, 7)), 8)
