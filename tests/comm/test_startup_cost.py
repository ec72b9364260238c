"""The cost of joining a world does not grow with the number of ranks, but with the rank's own groups."""

from benchmarks.scale import count


def test_a_rank_of_a_thousand_asks_the_store_as_often_as_one_of_eight():
    """Two training steps with the code of `weft train`, on a transport without other ranks."""
    small = count(8)
    large = count(1024)
    assert large.store_requests == 4 * large.groups
    assert small.store_requests == 4 * small.groups
    assert large.groups <= small.groups + 2  # two stages more for numbers of all ranks
    assert large.store_key_bytes < 50 * large.store_requests
    own_axes = (32 - 1) + (8 - 1) + (4 - 1)
    world_stages = (16 - 1) + (16 - 1) + (4 - 1)
    pipeline_pairs = 2
    assert large.sockets <= own_axes + world_stages + pipeline_pairs
