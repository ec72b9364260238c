"""Seconds of a schedule's table from the seconds of each stage, without measured regions.

Note [Reductions behind a backward]
    A backward that reduces gradients ends while reductions are under way: `least_left` of its last
    block; `most_left` where they take longer than the kernels, for more of which it waits. The rank
    goes on, and a bubble hides as much of them as fits. A forward of ZeRO 3 that begins before they
    have ended finds them on the link of the all-gather that it waits for first: with a communicator
    of their own they get half of the link from then on, else the gather begins behind them. The
    reductions of the next backward begin behind them. The step goes on until the last have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.planner.simulate.pipeline_time import ActionClass, PipelineOrder
from weft.schedule.engine import play
from weft.schedule.simulate import ACTIVATION_CHANGE


class Reductions(NamedTuple):
    """Reductions of a backward, seconds; see Note [Reductions behind a backward].

    Attributes:
        before: of the backward, before the first one begins.
        seconds: of all of them, and of all-gathers beside them, alone on their link.
        least_left, most_left: of these, behind the backward.
    """

    before: float
    seconds: float
    least_left: float
    most_left: float

    def played(self, start: float, end: float, link_free: float) -> tuple[float, float]:
        """When a backward ends and its link is free, from its begin and the end of its kernels.

        Args:
            link_free: when earlier reductions have ended.
        """
        before, seconds, least_left, most_left = self
        begin = start + before
        if link_free > begin:
            begin = link_free
        reduced = begin + seconds
        if reduced - most_left > end:
            end = reduced - most_left
        behind = end + least_left
        return end, reduced if reduced > behind else behind


NO_REDUCTIONS = Reductions(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StageCollectives:
    """Collectives of a stage over data ranks, seconds.

    Attributes:
        forward_gather, backward_gather: that an action waits for before its first kernel.
        reductions, last_reductions: of every backward, and of the last one of the stage.
    """

    forward_gather: float = 0.0
    backward_gather: float = 0.0
    reductions: Reductions = NO_REDUCTIONS
    last_reductions: Reductions = NO_REDUCTIONS

    def gather(self, kind: str) -> float:
        """Seconds of an action's gathers; weight gradients need no parameters."""
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

    def of(self, kind: str, stage: int) -> float:
        """Seconds of an action that is not the last one of its stage."""
        if kind == "F":
            return self.forward[stage]
        shares = {"B": 1.0, "I": self.inputs_share, "W": self.weights_share}
        return shares[kind] * self.backward[stage]

    def of_class(self, entry: ActionClass) -> float:
        """Seconds of an action of a class."""
        kind = entry.key.kind
        stage = entry.stage
        seconds = self.of(kind, stage)
        if kind in ENDS_BACKWARD and entry.key.place == "last":
            seconds += self.last_backward[stage] - self.backward[stage]
        return seconds

    def reductions(self, entry: ActionClass) -> Reductions | None:
        """That an action starts; None without any."""
        kind = entry.key.kind
        if not self.collectives or kind not in ENDS_BACKWARD:
            return None
        own = self.collectives[entry.stage]
        found = own.last_reductions if entry.key.place == "last" else own.reductions
        if not found.seconds:
            return None
        if kind == "W":
            return found._replace(before=self.weights_share * found.before)
        return found

    def gather(self, entry: ActionClass) -> float:
        """Seconds of the all-gather that an action waits for first, alone on its link."""
        if not self.collectives:
            return 0.0
        return self.collectives[entry.stage].gather(entry.key.kind)


ENDS_BACKWARD = tuple(kind for kind, change in ACTIVATION_CHANGE.items() if change < 0)
"""Kinds of actions behind which no part of the backward of their micro-batch is left."""


def table_seconds(order: PipelineOrder, stages: StageSeconds) -> float:
    """When the last action of a table ends and the last reduction, if each action begins as soon as
    its rank is free and its input has arrived; see Note [Reductions behind a backward].
    """
    seconds = [stages.of_class(entry) for entry in order.classes]
    gathers = [stages.gather(entry) for entry in order.classes]
    reductions = [stages.reductions(entry) for entry in order.classes]
    class_of = order.class_of
    ranks = order.ranks
    message_s = stages.message_s
    link_free = [0.0] * order.table.num_ranks
    free_at = [0.0] * order.table.num_ranks

    def run(place: int, start: float) -> float:
        number = class_of[place]
        end = start + seconds[number]
        gather_s = gathers[number]
        if gather_s:
            left = link_free[ranks[place]] - start
            if left > 0:
                is_shorter = stages.shares_link and gather_s < left
                end += gather_s if is_shorter else left
        own = reductions[number]
        if own is not None:
            rank = ranks[place]
            end, link_free[rank] = own.played(start, end, link_free[rank])
        return end

    def send(_: int, end: float) -> float:
        return end + message_s

    play(order, run, send, free_at=free_at, latest=max)
    return max(*free_at, *link_free)
