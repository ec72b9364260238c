"""Split of blocks into pipeline stages: balanced by cost, or by counts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.model_config import BlockSpec
from weft.errors import PlanError
from weft.layout.stages import split_by_cost, split_by_counts

HIDDEN = ("batch", "seq", 8)
LOSS = BlockSpec("loss", 0, (), is_layer=False)


def layers_of(costs: list[int]) -> tuple[BlockSpec, ...]:
    layers = []
    for index, cost in enumerate(costs):
        layer = BlockSpec(f"layer{index}", cost, HIDDEN, is_layer=True)
        layers.append(layer)
    return tuple(layers)


def chain(costs: list[int], head: int = 0) -> tuple[BlockSpec, ...]:
    """Embedding, layers, head and loss."""
    first = BlockSpec("embed", 0, HIDDEN, is_layer=False)
    last = BlockSpec("head", head, HIDDEN, is_layer=False)
    return (first, *layers_of(costs), last, LOSS)


def num_layers(stages: tuple[tuple[str, ...], ...]) -> list[int]:
    counts: list[int] = []
    for stage in stages:
        layers = [name for name in stage if name.startswith("layer")]
        counts.append(len(layers))
    return counts


def layers_by_cost(layers: int, *, stages: int, head: int = 0) -> list[int]:
    """How many of some equal layers each stage gets."""
    blocks = chain([1] * layers, head)
    return num_layers(split_by_cost(blocks, stages))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 9), st.data())
def test_no_other_split_has_a_faster_slowest_stage(
    costs: list[int], head: int, data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    blocks = chain(costs, head)
    stages = split_by_cost(blocks, num_stages)
    in_order = [name for stage in stages for name in stage]
    assert in_order == [block.name for block in blocks]
    last_with_head = costs[-1] + head
    weights = [*costs[:-1], last_with_head]
    assert slowest_stage(blocks, stages) == least_slowest(weights, num_stages)


def slowest_stage(blocks: tuple[BlockSpec, ...], stages: tuple[tuple[str, ...], ...]) -> float:
    price = {block.name: block.flops for block in blocks}
    slowest = 0.0
    for stage in stages:
        cost = sum(price[name] for name in stage)
        slowest = max(slowest, cost)
    return slowest


def least_slowest(weights: list[int], num_stages: int) -> int:
    """Cost of the slowest stage of the best split, of all that there are."""
    slowest: list[int] = []
    for cut in itertools.combinations(range(1, len(weights)), num_stages - 1):
        bounds = (0, *cut, len(weights))
        costs: list[int] = []
        for first, stop in itertools.pairwise(bounds):
            costs.append(sum(weights[first:stop]))
        slowest.append(max(costs))
    return min(slowest)


def test_remainder_layers_do_not_land_on_the_first_stage() -> None:
    assert layers_by_cost(6, stages=4) == [1, 1, 2, 2]
    assert layers_by_cost(30, stages=4) == [7, 7, 8, 8]


def test_a_stage_with_an_expensive_head_gets_fewer_layers() -> None:
    assert layers_by_cost(8, stages=2, head=2) == [5, 3]


def test_counts_of_the_user_are_used() -> None:
    counts = (1, 3, 2)
    stages = split_by_counts(chain([1] * 6), counts)
    assert num_layers(stages) == list(counts)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((1, 2), "do not add up"),
        ((3, 3, 1), "do not add up"),
        ((7, -1), "do not add up"),
        ((3, 0, 3), "stage 1 has no layer"),
        ((0, 3, 0, 3), "stage 2 has no layer"),
        ((0, 0, 6), "stage 1 has no layer"),
    ],
)
def test_counts_that_do_not_add_up_are_rejected(counts: tuple[int, ...], message: str) -> None:
    blocks = chain([1] * 6)
    line = rf"pipeline\.split: .*{message}.*first and the last may be 0"
    with pytest.raises(PlanError, match=line):
        split_by_counts(blocks, counts)


def test_the_first_and_the_last_stage_may_have_no_layer() -> None:
    blocks = chain([1] * 2)
    assert split_by_counts(blocks, (0, 1, 1, 0)) == (
        ("embed",),
        ("layer0",),
        ("layer1",),
        ("head", "loss"),
    )
    assert split_by_counts(blocks, (2, 0)) == (("embed", "layer0", "layer1"), ("head", "loss"))


@pytest.mark.parametrize("last", [(), (LOSS,)], ids=["layers alone", "layers and loss"])
def test_an_end_without_blocks_of_its_own_needs_a_layer(last: tuple[BlockSpec, ...]) -> None:
    blocks = (*layers_of([1] * 3), *last)
    no_layer = r"has no layer \(.*need at least one layer a stage\)"
    for counts in ((0, 3), (3, 0)):
        with pytest.raises(PlanError, match=no_layer):
            split_by_counts(blocks, counts)
    with pytest.raises(PlanError, match="need at most 3 stages"):
        split_by_cost(blocks, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 30))
def test_one_or_two_stages_more_than_layers_leave_the_ends_without(
    costs: list[int], head: int
) -> None:
    blocks = chain(costs, head)
    ones = [1] * len(costs)
    one_more = split_by_cost(blocks, len(costs) + 1)
    assert num_layers(one_more) in ([0, *ones], [*ones, 0])
    last_with_head = costs[-1] + head
    without_first = max(*costs[:-1], last_with_head, 0)
    without_last = max(*costs, head)
    assert slowest_stage(blocks, one_more) == min(without_first, without_last)
    two_more = split_by_cost(blocks, len(costs) + 2)
    assert num_layers(two_more) == [0, *ones, 0]
    with pytest.raises(PlanError, match=r"more stages than layers .*the layers, embed and head"):
        split_by_cost(blocks, len(costs) + 3)


def test_deep_models_are_split_quickly() -> None:
    layers = layers_by_cost(126, stages=64, head=1)
    assert layers[-1] == 1
