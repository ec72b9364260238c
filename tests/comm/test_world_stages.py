"""Collectives over all ranks in stages: every rank gets the same result, through groups of at most 16 ranks."""

import math
from dataclasses import dataclass

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.group import MAX_STAGE_RANKS, stage_sizes, world_stages
from weft.comm.observe import Counter
from weft.core.mesh import Mesh
from weft.testing import run_ranks


def test_stage_sizes_multiply_to_the_world_and_stay_small():
    for world_size in range(1, 3000):
        sizes = stage_sizes(world_size)
        assert math.prod(sizes) == world_size
        for size in sizes:
            is_prime = all(size % divisor for divisor in range(2, size))
            assert size >= 2
            assert size <= MAX_STAGE_RANKS or is_prime


def test_the_largest_worlds_take_few_peers():
    assert stage_sizes(16_384) == (16, 16, 16, 4)
    for world_size in (256, 1024, 4096, 16_384, 65_536):
        num_peers = sum(size - 1 for size in stage_sizes(world_size))
        assert num_peers <= 15 * math.ceil(math.log(world_size, 16))


@pytest.mark.parametrize("world_size", [1, 2, 12, 17, 24, 36, 48])
def test_the_groups_of_a_stage_hold_every_rank_once(world_size: int):
    for stage in range(len(stage_sizes(world_size))):
        groups = {
            world_stages(rank, world_size, checked=False)[stage].ranks for rank in range(world_size)
        }
        members = [rank for group in groups for rank in group]
        assert sorted(members) == list(range(world_size))


@dataclass(frozen=True)
class WorldResults:
    """What a rank gets from operations of all ranks on a row of two numbers."""

    rows: list[list[float]]
    total: list[float]
    largest: list[float]


@pytest.mark.parametrize("mesh", ["dp1", "dp3", "dp16", "dp17", "dp6 tp4", "pp2 dp5 tp4"])
def test_every_rank_gets_the_same_totals_and_the_rows_in_rank_order(mesh: str):
    def main(comm: Comm) -> WorldResults:
        numbers = [0.1 * comm.rank, -comm.rank]
        row = torch.tensor(numbers, dtype=torch.float64)
        rows = comm.all_gather_world(row.unsqueeze(0))
        largest = comm.combine_world(row, lambda rows: rows.amax(0))
        comm.barrier_world()
        total = comm.sum_world(row)
        return WorldResults(rows.tolist(), total.tolist(), largest.tolist())

    world_size = Mesh.parse(mesh).size
    results = run_ranks(mesh, main)
    first = results[0]
    for result in results:
        assert result == first
    assert first.rows == [[0.1 * rank, -rank] for rank in range(world_size)]
    columns = list(zip(*first.rows, strict=True))
    sums = [sum(column) for column in columns]
    assert first.total == pytest.approx(sums, rel=1e-14)
    assert first.largest == [max(column) for column in columns]


def test_a_rank_takes_part_in_one_collective_of_each_stage():
    def main(comm: Comm) -> int:
        counter = Counter()
        observed = Comm(comm.mesh, comm.rank, comm.transport, observers=(counter,))
        observed.sum_world(torch.ones(1))
        return counter.total().operations

    assert set(run_ranks("dp6 tp4", main)) == {len(stage_sizes(24))}
