"""Replay of a recorded region on lanes: its kernels, one lane a communicator, and links that lanes share.

Note [Lanes]
    Kernels of a rank run one after another; so do the operations of one communicator, in the order
    in which the rank starts them (of messages: one lane for what a rank sends along an axis and one
    for what it receives). An operation begins when the rank has started it and its lane is free.
    Where the real code waits for it, the kernels wait. So what overlaps is what the code overlaps;
    kernels beside an operation lose `Efficiency.overlap_slowdown` of its time.
    An operation that has not ended when its region does goes on in the next region of the rank.

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

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.comm.observe import Operation
from weft.core.dimension import pipeline_axis
from weft.planner.kernels import KernelLaunch
from weft.planner.recorder import RecordedRegion, Started
from weft.planner.speeds import Speeds

Link = Literal["node", "network"]

ROUNDING = 1e-12
"""Share of an operation below which what is left of it is a rounding error."""
TICKS_A_SECOND = 2.0**40
"""Times of regions are whole ticks of about 1 ps: so sums of them are exact, and regions that begin
alike are found again (up to 8,000 s).
"""


class CommOp(NamedTuple):
    """A collective or message of a rank.

    Attributes:
        axis: mesh axis, or several joined by "+".
        lane: its communicator.
        seconds: alone on its link.
    """

    name: str
    axis: str
    lane: str
    link: Link
    seconds: float


class Compute(NamedTuple):
    """Kernels, one after another."""

    seconds: float


class Start(NamedTuple):
    """The rank starts the operation of this number in its region."""

    number: int


class WaitForOwn(NamedTuple):
    """The rank waits for an operation that it started in this region."""

    number: int


class WaitForCarried(NamedTuple):
    """The rank waits for the oldest operation of a lane that an earlier region started and that has
    not been waited for.
    """

    lane: str


RegionStep = Compute | Start | WaitForOwn | WaitForCarried


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


@dataclass(frozen=True)
class RegionCosts:
    """A region with its work in seconds.

    Attributes:
        steps: in order; kernels without an operation between them are one step.
        ops: that it starts.
        compute: seconds of its kernels.
        links: that its operations use.
        before_first_op: seconds of the kernels before its first operation.
        overlap_slowdown: see Note [Lanes].
    """

    steps: tuple[RegionStep, ...]
    ops: tuple[CommOp, ...]
    compute: float
    links: frozenset[Link]
    before_first_op: float
    overlap_slowdown: float = 0.0


@dataclass(frozen=True)
class RegionTime:
    """Seconds of a region.

    Attributes:
        total: from its begin to its end.
        compute: of its kernels.
        exposed: waits for collectives, by axis.
        carried: operations that have not been waited for at its end.
        spans: of its operations and of those that earlier regions carried into it.
    """

    total: float
    compute: float
    exposed: Mapping[str, float]
    carried: tuple[Carried, ...] = ()
    spans: tuple[OpSpan, ...] = ()

    @property
    def under_way(self) -> float:
        """Seconds until all carried operations have ended, if nothing else starts."""
        replay = _LinkReplay(self.carried, ())
        return replay.finish()


def link_of(group: Iterable[int], *, node: int) -> Link:
    """The link that an operation of these ranks uses; see Note [Shared links]."""
    nodes = {rank // node for rank in group}
    return "node" if len(nodes) == 1 else "network"


def whole_ticks(seconds: float) -> float:
    """The nearest whole tick."""
    return round(seconds * TICKS_A_SECOND) / TICKS_A_SECOND


class CostTable:
    """Seconds of kernels and operations on a device, each computed once."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self._kernels: dict[KernelLaunch, float] = {}
        self._regions: dict[tuple[int, float], tuple[RecordedRegion, RegionCosts]] = {}

    def kernel_s(self, kernel: KernelLaunch) -> float:
        """Seconds of one launch."""
        seconds = self._kernels.get(kernel)
        if seconds is None:
            seconds = self.speeds.kernel_s(kernel)
            self._kernels[kernel] = seconds
        return seconds

    def operation(self, op: Operation) -> CommOp:
        """An operation with its lane, link and seconds."""
        lane = f"{op.axis} {op.op}" if op.op in ("send", "recv") else op.axis
        link = link_of(op.group, node=self.speeds.hardware.node)
        return CommOp(op.op, op.axis, lane, link, self.speeds.operation_s(op))

    def region(self, region: RecordedRegion, *, slow: float = 1.0) -> RegionCosts:
        """The region with its work in seconds; its kernels take `slow` times as long."""
        key = (id(region), slow)
        if key not in self._regions:
            self._regions[key] = region, _region_costs(region, self, slow)
        return self._regions[key][1]


def _region_costs(region: RecordedRegion, table: CostTable, slow: float) -> RegionCosts:
    steps: list[RegionStep] = []
    ops: list[CommOp] = []
    numbers: dict[int, int] = {}
    computed = 0.0
    total = 0.0
    before_first_op: float | None = None
    for event in region.events:
        if isinstance(event, KernelLaunch):
            computed += slow * table.kernel_s(event)
            continue
        own = numbers.get(id(event.op))
        is_message_of_stages = event.op.axis == pipeline_axis() and own is None
        if not isinstance(event, Started) and is_message_of_stages:
            continue  # the schedule has it
        if computed:
            steps.append(Compute(computed))
            total += computed
            computed = 0.0
        if isinstance(event, Started):
            if before_first_op is None:
                before_first_op = total
            numbers[id(event.op)] = len(ops)
            steps.append(Start(len(ops)))
            ops.append(table.operation(event.op))
        elif own is None:
            steps.append(WaitForCarried(table.operation(event.op).lane))
        else:
            steps.append(WaitForOwn(own))
    if computed:
        steps.append(Compute(computed))
        total += computed
    links = frozenset(op.link for op in ops)
    return RegionCosts(
        steps=tuple(steps),
        ops=tuple(ops),
        compute=total,
        links=links,
        before_first_op=total if before_first_op is None else before_first_op,
        overlap_slowdown=table.speeds.efficiency.overlap_slowdown,
    )


@dataclass(eq=False)
class _OpUnderWay:
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
class _LinkReplay:
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
    queues: dict[str, deque[_OpUnderWay]] = field(default_factory=dict)
    pending: list[_OpUnderWay] = field(default_factory=list)
    from_before: list[_OpUnderWay] = field(default_factory=list)
    spans: list[OpSpan] = field(default_factory=list)

    def __post_init__(self) -> None:
        for op, left_s, has_begun in self.carried:
            under_way = _OpUnderWay(op, left_s, is_continued=has_begun)
            self.pending.append(under_way)
            self.from_before.append(under_way)
            if left_s:
                if has_begun:
                    under_way.began_at = 0.0
                self.queues.setdefault(op.lane, deque()).append(under_way)

    def start(self, op: CommOp, now: float) -> _OpUnderWay:
        """Put an operation on its lane at this time."""
        self.advance(now)
        under_way = _OpUnderWay(op, op.seconds)
        self.pending.append(under_way)
        if op.seconds:
            self.queues.setdefault(op.lane, deque()).append(under_way)
        return under_way

    def advance(self, until: float) -> None:
        """Let operations progress until this time."""
        while self.clock < until:
            if not self._progress(until):
                self.clock = until

    def finish_op(self, op: _OpUnderWay) -> float:
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
            sharers[head.op.link] = sharers.get(head.op.link, 0) + 1
        stopped, step = self._messages(until)
        moving = [head for head in heads if head.op.link not in stopped]
        for head in moving:
            step = min(step, head.left_s * sharers[head.op.link])
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
        next_change = float("inf") if until is None else until
        for link, start, seconds in self.blocked:
            end = start + seconds
            if start <= self.clock < end:
                stopped.add(link)
                next_change = min(next_change, end)
            elif self.clock < start:
                next_change = min(next_change, start)
        return stopped, next_change - self.clock

    def _end(self, under_way: _OpUnderWay) -> None:
        under_way.left_s = 0.0
        self.queues[under_way.op.lane].popleft()
        self._note_span(under_way, continues=False)

    def _note_span(self, under_way: _OpUnderWay, *, continues: bool) -> None:
        assert under_way.began_at is not None
        self.spans.append(
            OpSpan(
                op=under_way.op,
                start=under_way.began_at,
                end=self.clock,
                is_continued=under_way.is_continued,
                continues=continues,
            )
        )

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


def replay(
    region: RegionCosts,
    *,
    gap: float = 0.0,
    carried: Iterable[Carried] = (),
    blocked: tuple[LinkMessage, ...] = (),
) -> RegionTime:
    """Seconds of a region; see Note [Lanes].

    Args:
        gap: seconds between the end of the rank's last region and the begin of this one.
        carried: operations that the last region left.
        blocked: when messages have a link, in seconds after the end of the last region.
    """
    links = _LinkReplay(carried, blocked)
    links.advance(gap)
    links.active = 0.0
    now = gap
    started: list[_OpUnderWay] = []
    exposed: dict[str, float] = {}
    for step in region.steps:
        match step:
            case Compute(seconds):
                now += seconds
                continue
            case Start(number):
                started.append(links.start(region.ops[number], now))
                continue
            case WaitForOwn(number):
                waited = started[number]
            case WaitForCarried(lane):
                found = _oldest(links.from_before, lane)
                if found is None:  # it was started before the recording and has ended
                    continue
                waited = found
        links.advance(now)
        end = max(now, links.finish_op(waited))
        waited.is_waited_for = True
        exposed[waited.op.axis] = exposed.get(waited.op.axis, 0.0) + end - now
        now = end
    links.advance(now)
    hidden = max(0.0, links.active - sum(exposed.values()))
    now += hidden * region.overlap_slowdown
    links.advance(now)
    carried_on = links.carry()
    return RegionTime(
        total=whole_ticks(now - gap),
        compute=region.compute,
        exposed=exposed,
        carried=carried_on,
        spans=tuple(_shifted(span, -gap) for span in links.spans),
    )


def region_time(region: RecordedRegion, speeds: Speeds) -> RegionTime:
    """Seconds of a region that finds all lanes free."""
    return replay(CostTable(speeds).region(region))


def _oldest(pending: list[_OpUnderWay], lane: str) -> _OpUnderWay | None:
    for under_way in pending:
        if under_way.op.lane == lane and not under_way.is_waited_for:
            return under_way
    return None


def _shifted(span: OpSpan, seconds: float) -> OpSpan:
    return span._replace(start=span.start + seconds, end=span.end + seconds)
