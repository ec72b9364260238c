"""Seconds of a schedule's table from the seconds of each stage: no overlap, no shared links, no measured regions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.simulate.pipeline_time import ActionClass, PipelineOrder


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of the actions of every stage for one micro-batch.

    Attributes:
        forward, backward: by stage.
        last_backward: by stage, of the last micro-batch, beside the reduction of gradients.
        inputs_share, weights_share: of a backward, where it is split into both.
        message_s: of a tensor to a neighbouring pipeline rank.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    last_backward: Sequence[float]
    inputs_share: float
    weights_share: float
    message_s: float

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
        ends_backward = kind in ("B", "W")
        if ends_backward and entry.key.place == "last":
            seconds += self.last_backward[stage] - self.backward[stage]
        return seconds


def table_seconds(
    order: PipelineOrder,
    stages: StageSeconds,
) -> float:
    """When the last action of a table ends, if each begins as soon as its rank is free and its
    input has arrived.
    """
    ranks = [entry.rank for entry in order.classes]
    seconds = [stages.of_class(entry) for entry in order.classes]
    message_s = stages.message_s
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
        now[rank] = end
        ends.append(end)
    return max(now)
