"""Split of blocks into pipeline stages: balanced by cost, or by counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.model_config import BlockSpec
from weft.errors import PlanError
from weft.layout.stages import split_by_cost, split_by_counts


def chain(costs: list[int], head: int = 0) -> tuple[BlockSpec, ...]:
    hidden = ("batch", "seq", 8)
    specs = [BlockSpec("embed", 0, hidden, is_layer=False)]
    for index, cost in enumerate(costs):
        layer = BlockSpec(f"layer{index}", cost, hidden, is_layer=True)
        specs.append(layer)
    specs.append(BlockSpec("head", head, hidden, is_layer=False))
    specs.append(BlockSpec("loss", 0, (), is_layer=False))
    return tuple(specs)


def num_layers(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    counts: list[int] = []
    for stage in stages:
        layers = [name for name in stage if name.startswith("layer")]
        counts.append(len(layers))
    return counts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 9), st.data())
def test_no_other_split_has_a_faster_slowest_stage(
    costs: list[int], head: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    blocks = chain(costs, head)
    price = {block.name: block.flops for block in blocks}
    stages = split_by_cost(blocks, num_stages)
    assert list(itertools.chain(*stages)) == list(price)
    found = [sum(price[name] for name in stage) for stage in stages]
    weights = [*costs[:-1], costs[-1] + head]
    assert max(found) == least_slowest(weights, num_stages)


def least_slowest(weights: list[int], num_stages: int) -> int:
    """Cost of the slowest stage of the best split, of all that there are."""
    slowest: list[int] = []
    for cut in itertools.combinations(range(1, len(weights)), num_stages - 1):
        bounds = (0, *cut, len(weights))
        stages = [sum(weights[lo:hi]) for lo, hi in itertools.pairwise(bounds)]
        slowest.append(max(stages))
    return min(slowest)


def test_remainder_layers_do_not_land_on_the_first_stage() -> None:
    assert num_layers(split_by_cost(chain([1] * 6), 4)) == [1, 1, 2, 2]
    assert num_layers(split_by_cost(chain([1] * 30), 4)) == [7, 7, 8, 8]


def test_a_stage_with_an_expensive_head_gets_fewer_layers() -> None:
    assert num_layers(split_by_cost(chain([1] * 8, head=2), 2)) == [5, 3]


def test_thirty_layers_on_four_stages_stay_thirty() -> None:
    assert sum(num_layers(split_by_cost(chain([1] * 30), 4))) == 30


def test_counts_of_the_user_are_used() -> None:
    assert num_layers(split_by_counts(chain([1] * 6), (1, 3, 2))) == [1, 3, 2]


@pytest.mark.parametrize("counts", [(1, 2), (3, 3, 1), (6, 0)])
def test_counts_that_do_not_add_up_are_rejected(counts: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"pipeline\.split"):
        split_by_counts(chain([1] * 6), counts)


def test_more_stages_than_layers_are_rejected() -> None:
    with pytest.raises(PlanError, match="more stages than layers"):
        split_by_cost(chain([1] * 3), 4)


def test_deep_models_are_split_quickly() -> None:
    assert num_layers(split_by_cost(chain([1] * 126, head=1), 64))[-1] == 1
