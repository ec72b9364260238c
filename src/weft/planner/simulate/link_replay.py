"""Progress of operations of one device on their lanes, and links that lanes share.

Note [Shared links]
    A device has two links: one inside the node, and its share of the node's network. An operation
    whose group lies in one node uses the first, any other one the second. While n lanes of a device
    are under way on one link, each progresses at 1/n of its speed, as if alone. Two operations of 1
    s that start together both end after 2 s; of 1 s and 3 s, the first ends after 2 s, the second
    after 4 s. What a device receives in messages shares nothing: links are full duplex.

    Groups of one node that use its network at the same time (the data-parallel groups of eight
    devices, for example) do not slow each other down: each has the shares of its own members
    (`Speeds.operation_s`). A device never has more than its share, even while others are silent.

    Messages between pipeline stages go first: they are short beside an action. While one is sent,
    the other lanes on that link stand still.

    With shared links a step may take longer when a kernel is faster: it starts an operation earlier,
    which then slows one that the rank waits for. Without sharing every time is a sum or a maximum of
    others, in a fixed order, and no faster kernel or link makes a step longer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.planner.simulate.region_costs import CommOp
from weft.planner.simulate.speeds import Link

ROUNDING = 1e-12
"""Share of an operation below which what is left of it is a rounding error."""
TICKS_A_SECOND = 2.0**40
"""Times of regions are whole ticks of about 1 ps: so sums of them are exact, and regions that begin
alike are found again (up to 8,000 s).
"""


class Carried(NamedTuple):
    """An operation that a region has started and not waited for.

    Attributes:
        left_s: seconds that it still takes alone on its link; 0 when it has ended.
        has_begun: whether its lane has reached it.
    """

    op: CommOp
    left_s: float
    has_begun: bool


class LinkMessage(NamedTuple):
    """Seconds in which a message has the link; `start` counts from the end of the last region."""

    link: Link
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """When it has arrived."""
        return self.start + self.seconds

    def after(self, begin: float) -> LinkMessage:
        """The message with its start counted from `begin`."""
        return LinkMessage(self.link, self.start - begin, self.seconds)


class OpSpan(NamedTuple):
    """When an operation was under way, in seconds after the begin of its region.

    Attributes:
        is_continued: whether it began in an earlier region.
        continues: whether it had not ended at the end of this one.
    """

    op: CommOp
    start: float
    end: float
    is_continued: bool
    continues: bool


def whole_ticks(seconds: float) -> float:
    """The nearest whole tick."""
    return round(seconds * TICKS_A_SECOND) / TICKS_A_SECOND


@dataclass(eq=False)
class OpUnderWay:
    """An operation on its lane."""

    op: CommOp
    left_s: float
    is_continued: bool = False
    began_at: float | None = None
    is_waited_for: bool = False

    @property
    def has_ended(self) -> bool:
        return self.left_s == 0.0


@dataclass
class LinkReplay:
    """Progress of the operations of a device; see Note [Shared links].

    Attributes:
        clock: time up to which operations have progressed.
        active: seconds of it in which some operation was under way.
        queues: operations that have not ended, by lane.
        pending: operations that the region finds or starts, oldest first.
        from_before: those that it finds.
    """

    carried: Iterable[Carried]
    blocked: tuple[LinkMessage, ...]
    clock: float = 0.0
    active: float = 0.0
    queues: dict[str, deque[OpUnderWay]] = field(default_factory=dict)
    pending: list[OpUnderWay] = field(default_factory=list)
    from_before: list[OpUnderWay] = field(default_factory=list)
    spans: list[OpSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        for op, left_s, has_begun in self.carried:
            under_way = OpUnderWay(op, left_s, is_continued=has_begun)
            self.pending.append(under_way)
            self.from_before.append(under_way)
            if not left_s:
                continue
            if has_begun:
                under_way.began_at = 0.0
            self._add_to_lane(under_way)

    def _add_to_lane(self, under_way: OpUnderWay) -> None:
        lane = self.queues.setdefault(under_way.op.lane, deque())
        lane.append(under_way)

    def oldest(self, lane: str) -> OpUnderWay | None:
        """The oldest operation of a lane that the region finds and has not waited for."""
        for under_way in self.from_before:
            if under_way.op.lane == lane and not under_way.is_waited_for:
                return under_way
        return None

    def start(self, op: CommOp, now: float) -> OpUnderWay:
        """Put an operation on its lane at this time."""
        self.advance(now)
        under_way = OpUnderWay(op, op.seconds)
        self.pending.append(under_way)
        if op.seconds:
            self._add_to_lane(under_way)
        return under_way

    def advance(self, until: float) -> None:
        """Let operations progress until this time."""
        while self.clock < until:
            if not self._progress(until):
                self.clock = until

    def finish_op(self, op: OpUnderWay) -> float:
        """The time at which an operation has ended."""
        while not op.has_ended:
            self._progress(None)
        return self.clock

    def finish(self) -> float:
        """The time at which all operations have ended."""
        while self._progress(None):
            pass
        return self.clock

    def _progress(self, until: float | None) -> bool:
        """Progress to the next end of an operation, begin or end of a message, or `until`; False if
        no operation is under way.
        """
        heads = [queue[0] for queue in self.queues.values() if queue]
        if not heads:
            return False
        sharers: dict[Link, int] = {}
        for head in heads:
            if head.began_at is None:
                head.began_at = self.clock
            link = head.op.link
            sharers[link] = sharers.get(link, 0) + 1
        stopped, step = self._messages(until)
        moving = [head for head in heads if head.op.link not in stopped]
        for head in moving:
            share = sharers[head.op.link]
            step = min(step, head.left_s * share)
        self.clock += step
        self.active += step
        for head in moving:
            share = sharers[head.op.link]
            head.left_s -= step / share
            if head.left_s <= ROUNDING * head.op.seconds:
                self._end(head)
        return True

    def _messages(self, until: float | None) -> tuple[set[Link], float]:
        """Links that a message has now, and seconds until that changes, at most until `until`."""
        stopped: set[Link] = set()
        next_change = math.inf if until is None else until
        for message in self.blocked:
            end = message.end
            if message.start <= self.clock < end:
                stopped.add(message.link)
                next_change = min(next_change, end)
            elif self.clock < message.start:
                next_change = min(next_change, message.start)
        return stopped, next_change - self.clock

    def _end(self, under_way: OpUnderWay) -> None:
        under_way.left_s = 0.0
        self.queues[under_way.op.lane].popleft()
        self._note_span(under_way, continues=False)

    def _note_span(self, under_way: OpUnderWay, *, continues: bool) -> None:
        assert under_way.began_at is not None
        span = OpSpan(
            op=under_way.op,
            start=under_way.began_at,
            end=self.clock,
            is_continued=under_way.is_continued,
            continues=continues,
        )
        self.spans.append(span)

    def carry(self) -> tuple[Carried, ...]:
        """What the next region finds."""
        kept: list[Carried] = []
        for under_way in self.pending:
            if under_way.is_waited_for:
                continue
            under_way.left_s = whole_ticks(under_way.left_s)
            has_begun = under_way.began_at is not None
            if has_begun and not under_way.has_ended:
                self._note_span(under_way, continues=True)
            kept.append(Carried(under_way.op, under_way.left_s, has_begun))
        return tuple(kept)
