"""Replay of a recorded region on lanes: its kernels, one lane a communicator, and links that lanes share.

Note [Lanes]
    Kernels of a rank run one after another; so do the operations of one communicator, in the order
    in which the rank starts them (of messages: one lane for what a rank sends along an axis and one
    for what it receives). On GPUs the reductions of ZeRO 3 have a communicator of their own, so they
    run beside the all-gathers of the same ranks and share their link; gloo has one for both. An
    operation begins when the rank has started it and its lane is free.
    Where the real code waits for it, the kernels wait. So what overlaps is what the code overlaps;
    kernels beside an operation lose `Efficiency.overlap_slowdown` of its time.
    An operation that has not ended when its region does goes on in the next region of the rank.
    Links that lanes share: see Note [Shared links] in `link_replay`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.planner.measure.recorder import RecordedRegion
from weft.planner.simulate.link_replay import (
    Carried,
    LinkMessage,
    LinkReplay,
    OpSpan,
    OpUnderWay,
    whole_ticks,
)
from weft.planner.simulate.region_costs import (
    Compute,
    CostTable,
    RegionCosts,
    Start,
    WaitForCarried,
    WaitForOwn,
)
from weft.planner.simulate.speeds import Speeds


@dataclass(frozen=True)
class RegionTime:
    """Seconds that a region takes, and their parts.

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
        replay = LinkReplay(self.carried, ())
        return replay.finish()


def replay(
    region: RegionCosts,
    *,
    gap: float = 0.0,
    carried: Iterable[Carried] = (),
    blocked: tuple[LinkMessage, ...] = (),
) -> RegionTime:
    """Seconds that a region takes; see Note [Lanes].

    Args:
        gap: seconds between the end of the rank's last region and the begin of this one.
        carried: operations that the last region left.
        blocked: when messages have a link, in seconds after the end of the last region.
    """
    links = LinkReplay(carried, blocked)
    links.advance(gap)
    links.active = 0.0
    now = gap
    started: list[OpUnderWay] = []
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
                found = links.oldest(lane)
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


def _shifted(span: OpSpan, seconds: float) -> OpSpan:
    return span._replace(start=span.start + seconds, end=span.end + seconds)
