"""Seconds of a schedule's table from the seconds of each stage, without measured regions.

Note [Reductions behind a backward]
    Under ZeRO 3 a backward ends while the reduction of its last block is under way. The rank goes
    on, and a bubble hides as much of it as fits; an action that begins before it has ended finds it
    on the link of the all-gather that it waits for first. With a communicator of its own the
    reduction gets half of the link from then on, else the gather begins behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.simulate.pipeline_time import ActionClass, PipelineOrder


@dataclass(frozen=True)
class StageCollectives:
    """Seconds of collectives of a stage, alone on their link; see Note [Reductions behind a backward].

    Attributes:
        forward_gather, backward_gather: that an action waits for before its first kernel.
        left: of the reduction that a backward leaves under way.
    """

    forward_gather: float
    backward_gather: float
    left: float

    def gather(self, kind: str) -> float:
        """Of an action; weight gradients need no parameters."""
        if kind == "W":
            return 0.0
        return self.forward_gather if kind == "F" else self.backward_gather


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the actions of every stage for one micro-batch.

    Attributes:
        forward, backward: by stage.
        last_backward: by stage, of the last micro-batch, beside the reduction of gradients.
        inputs_share, weights_share: of a backward, where it is split into both.
        message_s: of a tensor to a neighbouring pipeline rank.
        collectives: by stage, of those that go on behind an action; () where none do.
        shares_link: whether reductions and all-gathers have a communicator each.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    last_backward: Sequence[float]
    inputs_share: float
    weights_share: float
    message_s: float
    collectives: Sequence[StageCollectives] = ()
    shares_link: bool = False

    def of(
        self,
        kind: str,
        stage: int,
    ) -> float:
        """Seconds of an action that is not the last one of its stage."""
        if kind == "F":
            return self.forward[stage]
        shares = {"B": 1.0, "I": self.inputs_share, "W": self.weights_share}
        return shares[kind] * self.backward[stage]

    def of_class(self, entry: ActionClass) -> float:
        """Seconds of an action."""
        kind = entry.key.kind
        stage = entry.stage
        seconds = self.of(kind, stage)
        if kind in ENDS_BACKWARD and entry.key.place == "last":
            seconds += self.last_backward[stage] - self.backward[stage]
        return seconds

    def left(self, entry: ActionClass) -> float:
        """Seconds of the reduction that an action leaves under way, alone on its link."""
        if not self.collectives or entry.key.kind not in ENDS_BACKWARD:
            return 0.0
        return self.collectives[entry.stage].left

    def wait(self, entry: ActionClass, left: float) -> float:
        """Seconds by which an action is longer that finds a reduction under way."""
        gather_s = self.collectives[entry.stage].gather(entry.key.kind)
        if not gather_s:
            return 0.0
        return min(gather_s, left) if self.shares_link else left


ENDS_BACKWARD = ("B", "W")
"""Kinds of actions behind which no part of the backward of their micro-batch is left."""


def table_seconds(
    order: PipelineOrder,
    stages: StageSeconds,
) -> float:
    """When the last action of a table ends, if each begins as soon as its rank is free and its
    input has arrived; see Note [Reductions behind a backward].
    """
    ranks = [entry.rank for entry in order.classes]
    seconds = [stages.of_class(entry) for entry in order.classes]
    left = [stages.left(entry) for entry in order.classes]
    message_s = stages.message_s
    link_free = [0.0] * order.table.num_ranks
    now = [0.0] * order.table.num_ranks
    ends: list[float] = []
    for number, source in zip(order.class_of, order.source_of, strict=True):
        rank = ranks[number]
        start = now[rank]
        if source >= 0:
            arrival = ends[source] + message_s
            if arrival > start:
                start = arrival
        end = start + seconds[number]
        if link_free[rank] > start:
            end += stages.wait(order.classes[number], link_free[rank] - start)
        if left[number]:
            link_free[rank] = end + left[number]
        now[rank] = end
        ends.append(end)
    return max(now)
