"""Activations in flight on a pipeline rank: their bytes over the actions of a schedule, and their peaks.

Note [Split backward under recomputation]
    The input part of a split backward (I) computes the activations of its blocks again, and keeps
    the inputs and output gradients of their products until the weight part (W). So between I and W
    a stage holds more than between F and I, and a schedule that delays weight gradients holds the
    more of it: its row is replayed with both sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.schedule.actions import Act, Kind
from weft_plan.search.block_costs import BlockCosts
from weft_plan.search.pipeline_tables import HeldActivations


@dataclass(frozen=True)
class InFlight:
    """Bytes of the activations in flight of a rank.

    Attributes:
        forward: most during a forward.
        begin: most during the first block of a backward.
        backward: most during a block of a backward that has parameters.
        others: most during one that has none.
    """

    forward: float
    begin: float
    backward: float
    others: float


@dataclass(frozen=True)
class StageBytes:
    """Bytes of the activations of a stage for one micro-batch.

    Attributes:
        saved: from its forward to its backward.
        deferred: from the input part of a split backward to its weight part.
        forward: most during the forward, above the level before.
        backward: most during the backward or its input part, above the level before.
    """

    saved: int
    deferred: int
    forward: float
    backward: InFlight

    @cached_property
    def change(self) -> dict[Kind, int]:
        """What an action adds to the level."""
        saved, deferred = self.saved, self.deferred
        return {"F": saved, "B": -saved, "I": deferred - saved, "W": -deferred}

    @staticmethod
    def of(
        blocks: Sequence[BlockCosts], *, has_params: Sequence[bool], deferred: Sequence[int]
    ) -> StageBytes:
        """The bytes of a stage whose blocks are given in order.

        Args:
            has_params: whether each block has parameters.
            deferred: bytes of each block between both parts of a split backward.
        """
        saved = sum(block.saved_bytes for block in blocks)
        none = [not has for has in has_params]
        forward = forward_peak(0, blocks)
        backward = InFlight(
            forward=0,
            begin=blocks[-1].backward_peak,
            backward=backward_peak(0, blocks, has_params, deferred),
            others=backward_peak(0, blocks, none, deferred),
        )
        return StageBytes(saved, sum(deferred), forward, backward)


def in_flight_when_fullest(
    held: HeldActivations,
    blocks: Sequence[BlockCosts],
    *,
    saved: Sequence[int],
    has_params: Sequence[bool],
) -> InFlight:
    """Of a rank that holds these activations when it holds most.

    Args:
        blocks: of the stage whose forward made the last activation; `has_params` of them.
        saved: bytes of an activation of every stage.
    """
    size = sum(count * saved[stage] for stage, count in held.counts.items())
    before = size - saved[held.last_stage]
    none = [not has for has in has_params]
    whole = [0] * len(blocks)
    return InFlight(
        forward=forward_peak(before, blocks),
        begin=size + blocks[-1].backward_peak,
        backward=backward_peak(size, blocks, has_params, whole),
        others=backward_peak(size, blocks, none, whole),
    )


def replayed_in_flight(row: Sequence[Act], stages: Mapping[int, StageBytes]) -> InFlight:
    """Of a rank with this row of actions; see Note [Split backward under recomputation].

    Args:
        stages: those of the rank.
    """
    level = 0
    forward = begin = backward = others = 0.0
    for kind, number, _ in row:
        stage = stages[number]
        if kind == "F":
            forward = max(forward, level + stage.forward)
        elif kind != "W":
            during = stage.backward
            begin = max(begin, level + during.begin)
            backward = max(backward, level + during.backward)
            others = max(others, level + during.others)
        level += stage.change[kind]
    return InFlight(forward, begin, backward, others)


def forward_peak(before: float, blocks: Sequence[BlockCosts]) -> float:
    """Most bytes during the forward of a stage that begins with so many."""
    most = before
    level = before
    for block in blocks:
        most = max(most, level + block.forward_peak)
        level += block.saved_bytes
    return most


def backward_peak(
    before: float, blocks: Sequence[BlockCosts], counted: Sequence[bool], kept: Sequence[int]
) -> float:
    """Most bytes during some blocks of the backward of a stage that begins with so many.

    Args:
        counted: whether each block is one of them.
        kept: bytes of each block that its backward leaves for later.
    """
    most = 0.0
    level = before
    for place in reversed(range(len(blocks))):
        block = blocks[place]
        if counted[place]:
            most = max(most, level + block.backward_peak)
        level += kept[place] - block.saved_bytes
    return most
