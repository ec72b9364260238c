"""What a pipeline rank holds when weight gradients are delayed, and what more micro-batches add to a step."""

from __future__ import annotations

import pytest

from weft.planner.simulate.pipeline_time import pipeline_order
from weft.schedule.actions import Act
from weft.schedule.catalog import find
from weft_plan.search.block_costs import BlockCosts
from weft_plan.search.in_flight import StageBytes, replayed_in_flight
from weft_plan.simulation.table_time import (
    Reductions,
    StageCollectives,
    StageSeconds,
    table_seconds,
)


def layer(*, saved: int) -> BlockCosts:
    return BlockCosts(
        forward_s=1.0, backward_s=2.0, saved_bytes=saved, forward_peak=10, backward_peak=40
    )


def stage_bytes(*, saved: int, deferred: int) -> StageBytes:
    """Of a stage of two layers."""
    layers = [layer(saved=saved), layer(saved=saved)]
    return StageBytes.of(layers, has_params=[True, True], deferred=[deferred, deferred])


def test_a_delayed_weight_gradient_keeps_what_was_recomputed() -> None:
    """F0 F1 I0 I1 W0 W1: at I1 the rank holds the input of micro-batch 1 (2 layers of 1 byte), and
    what I0 has recomputed of both layers (2 x 20); its first layer runs when I1's second has left 20.
    """
    order = ("F", 0), ("F", 1), ("I", 0), ("I", 1), ("W", 0), ("W", 1)
    row = [Act(kind, 0, micro) for kind, micro in order]
    found = replayed_in_flight(row, {0: stage_bytes(saved=1, deferred=20)})
    assert found.forward == 2 + 1 + 10
    assert found.begin == 2 + 40 + 40
    assert found.backward == 2 + 40 + (20 - 1) + 40
    assert found.others == 42


def test_a_whole_backward_leaves_nothing() -> None:
    row = [Act("F", 0, 0), Act("B", 0, 0), Act("F", 0, 1), Act("B", 0, 1)]
    found = replayed_in_flight(row, {0: stage_bytes(saved=1, deferred=0)})
    assert found.begin == 2 + 40
    assert found.backward == 2 + 40


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zbv", 2), ("1f1b", 1)])
def test_every_further_round_of_micro_batches_adds_the_same_to_a_table(
    schedule: str, chunks: int
) -> None:
    """With uneven stages, more than the work of the busiest rank in an interleaved table."""
    forward = [0.3, 1.4, 1.5, 0.2][: 2 * chunks]
    backward = [2 * seconds for seconds in forward]
    stages = StageSeconds(
        forward=forward,
        backward=backward,
        last_backward=backward,
        inputs_share=0.5,
        weights_share=0.5,
        message_s=0.02,
    )
    ends = {}
    for num_micro in (6, 8, 32):
        table = find(schedule).table(2, chunks, num_micro)
        ends[num_micro] = table_seconds(pipeline_order(table), stages)
    round_s = ends[8] - ends[6]
    assert ends[32] == pytest.approx(ends[8] + 12 * round_s, rel=1e-3)


@pytest.mark.parametrize(
    ("message_s", "shares_link", "expected"),
    [
        (0.0, False, 12.5 + 2 * 0.5),  # the gathers of two forwards begin behind a reduction
        (0.0, True, 12.5 + 2 * 0.25),  # each has half of the link for as long as it takes alone
        (0.4, False, 14.1 + 0.2),  # the second of them finds 0.2 s: a bubble has hidden 0.3 s
        (0.4, True, 14.1),  # it has ended
    ],
)
def test_a_bubble_hides_the_reduction_behind_a_backward(
    message_s: float, shares_link: bool, expected: float
) -> None:
    """F 1 s and B 2 s on two ranks, three micro-batches; the second rank alone has collectives:

    0  F0 F1 .. B0 F2 B1 .. B2
    1  .. F0 B0 F1 B1 F2 B2
    """
    left = Reductions(before=1.5, seconds=1.0, least_left=0.5, most_left=0.5)
    busy = StageCollectives(forward_gather=0.25, reductions=left, last_reductions=left)
    stages = StageSeconds(
        forward=[1.0, 1.0],
        backward=[2.0, 2.0],
        last_backward=[2.5, 2.0],
        inputs_share=0.0,
        weights_share=0.0,
        message_s=message_s,
        collectives=[StageCollectives(), busy],
        shares_link=shares_link,
    )
    order = pipeline_order(find("1f1b").table(2, 1, 3))
    assert table_seconds(order, stages) == pytest.approx(expected)
