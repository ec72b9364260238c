"""Costs of each kind of block under a sharding: seconds, saved bytes and peaks for one micro-batch, measured and bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.comm.observe import Operation
from weft.core.sequence import DEFAULT_CONTEXT
from weft.parallel.cp import AXIS as CP
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.recorder import Ended, Event, RecordedRegion, Started
from weft.planner.measure.step_memory import boundary_bytes
from weft.planner.simulate.region_costs import CostTable
from weft.planner.simulate.region_time import replay
from weft.schedule import zero_bubble
from weft.schedule.actions import Act
from weft.schedule.catalog import DEFAULT_SCHEDULE
from weft.schedule.lower import Transfer
from weft_plan.search.candidates import MICRO_SIZES
from weft_plan.search.layout_choice import Layout
from weft_plan.search.short_runs import ShortRuns

LARGEST_MICRO = max(MICRO_SIZES)
SPLIT_SCHEDULE = zero_bubble.NAME
"""Whose backwards are all split; it measures both parts."""


@dataclass(frozen=True)
class BlockCosts:
    """Costs of a block on a rank for one micro-batch.

    Attributes:
        forward_s, backward_s: with the collectives that it waits for.
        saved_bytes: that live from its forward to its backward.
        forward_peak, backward_peak: bytes that live meanwhile above those at its begin.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class SplitShares:
    """The parts of a split backward, as shares of a whole one."""

    inputs: float
    weights: float


CostsByKind = Mapping[str, BlockCosts]


@dataclass(frozen=True)
class _MeasuredBlocks:
    """A short run of one block of each kind.

    Attributes:
        boundary_bytes: of the output of a stage.
    """

    names: tuple[str, ...]
    forward: RecordedRegion
    backward: RecordedRegion
    boundary_bytes: int


@dataclass(frozen=True)
class BlockSegments:
    """The parts of a region in which one block runs.

    Attributes:
        block: name.
        events: of each part.
        change_bytes: that all parts leave.
        peak_bytes: most that live during a part above those at its begin.
    """

    block: str
    events: tuple[Sequence[Event], ...] = ()
    change_bytes: int = 0
    peak_bytes: int = 0


class BlockMeasurements:
    """Costs of blocks, each sharding measured once."""

    def __init__(self, runs: ShortRuns, table: CostTable) -> None:
        self._runs = runs
        self._table = table
        self._measured: dict[Layout, _MeasuredBlocks] = {}
        self._blocks: dict[object, CostsByKind] = {}
        self._bounds: dict[tuple[Layout, bool], CostsByKind] = {}
        self._splits: dict[Layout, SplitShares] = {}
        self._splits_measured: dict[Layout, dict[str, RecordedRegion]] = {}
        self._deferred: dict[Layout, Mapping[str, int]] = {}

    def of(self, layout: Layout) -> CostsByKind:
        """The costs of each kind of block under the sharding of a layout, with the ranks of its
        groups where the layout has them.
        """
        key = layout.sharding, layout.strides
        known = self._blocks.get(key)
        if known is None:
            known = self._costs_of(self._measure(layout), layout)
            self._blocks[key] = known
        return known

    def boundary_bytes(self, layout: Layout) -> int:
        """Bytes of the output of a stage for one micro-batch."""
        return self._measure(layout).boundary_bytes

    def bounds(self, layout: Layout, *, has_own_recompute: bool = False) -> CostsByKind:
        """What each kind of block costs at least, from larger blocks: no part of a sequence or a
        batch costs less than its share of the whole, and selective recomputation adds to the time.

        Args:
            has_own_recompute: from blocks with the recomputation of the layout in any case: the
                bytes that it saves are bounded, too.
        """
        key = layout.sharding, has_own_recompute
        known = self._bounds.get(key)
        if known is None:
            recompute = layout.recompute
            if recompute == "selective" and not has_own_recompute:
                recompute = "none"  # spares a measurement
            known = self._scaled_bounds(layout, recompute)
            self._bounds[key] = known
        return known

    def _scaled_bounds(self, layout: Layout, recompute: str) -> CostsByKind:
        """Shares of the costs of blocks without context parallelism and of the largest micro-batch,
        measured with this recomputation.
        """
        whole = Layout(
            layout.block_degrees,
            recompute=recompute,
            sequence=layout.sequence,
            context=DEFAULT_CONTEXT,
            micro_size=LARGEST_MICRO,
        )
        share = layout.micro_size / LARGEST_MICRO / layout.degree(CP)
        is_same = recompute == layout.recompute
        memory_share = share if is_same else 0.0
        found = {}
        for kind, costs in self.of(whole).items():
            found[kind] = BlockCosts(
                forward_s=share * costs.forward_s,
                backward_s=share * costs.backward_s,
                saved_bytes=int(memory_share * costs.saved_bytes),
                forward_peak=int(memory_share * costs.forward_peak),
                backward_peak=int(memory_share * costs.backward_peak),
            )
        return found

    def _measure(self, layout: Layout) -> _MeasuredBlocks:
        sharding = layout.sharding
        known = self._measured.get(sharding)
        if known is None:
            step = self._runs.measure(sharding)
            regions = first_regions(step)
            first_output = Transfer(Act("F", 0, 0), 0)
            known = _MeasuredBlocks(
                names=step.plan.stages[0].blocks,
                forward=regions["F"],
                backward=regions["B"],
                boundary_bytes=boundary_bytes(step.plan, first_output),
            )
            self._measured[sharding] = known
        return known

    def _costs_of(self, measured: _MeasuredBlocks, layout: Layout) -> CostsByKind:
        forwards = block_segments(_placed(measured.forward, layout))
        backwards = block_segments(_placed(measured.backward, layout))
        found = {}
        for name in measured.names:
            forward = forwards.get(name, BlockSegments(name))
            backward = backwards.get(name, BlockSegments(name))
            found[name] = BlockCosts(
                forward_s=self._seconds(measured.forward, forward),
                backward_s=self._seconds(measured.backward, backward),
                saved_bytes=forward.change_bytes,
                forward_peak=forward.peak_bytes,
                backward_peak=backward.peak_bytes,
            )
        return found

    def _seconds(self, region: RecordedRegion, segments: BlockSegments) -> float:
        """Seconds that a block takes in a region."""
        seconds = 0.0
        for events in segments.events:
            part = replace(region, events=list(events))
            costs = self._table.region(part)
            seconds += replay(costs).total
        return seconds

    def split_shares(self, layout: Layout) -> SplitShares:
        """Of a backward, measured once for each degree of tp and ep, and recomputation."""
        key = Layout(layout.block_degrees, recompute=layout.recompute)
        known = self._splits.get(key)
        if known is None:
            whole = self._backward_seconds(layout, DEFAULT_SCHEDULE)
            split = self._backward_seconds(layout, SPLIT_SCHEDULE)
            known = SplitShares(inputs=split["I"] / whole["B"], weights=split["W"] / whole["B"])
            self._splits[key] = known
        return known

    def deferred_bytes(self, layout: Layout) -> Mapping[str, int]:
        """Bytes of each kind of block from the input part of a split backward to its weight part."""
        sharding = layout.sharding
        if sharding not in self._deferred:
            regions = self._split_regions(sharding)
            forwards = block_segments(regions["F"])
            inputs = block_segments(regions["I"])
            found = {}
            for name in self._measure(layout).names:
                saved = forwards.get(name, BlockSegments(name)).change_bytes
                change = inputs.get(name, BlockSegments(name)).change_bytes
                found[name] = max(0, saved + change)
            self._deferred[sharding] = found
        return self._deferred[sharding]

    def _split_regions(self, sharding: Layout) -> dict[str, RecordedRegion]:
        """An action of each kind of a schedule whose backwards are split, measured once."""
        known = self._splits_measured.get(sharding)
        if known is None:
            step = self._runs.measure(replace(sharding, schedule=SPLIT_SCHEDULE))
            known = first_regions(step)
            self._splits_measured[sharding] = known
        return known

    def _backward_seconds(self, layout: Layout, schedule: str) -> dict[str, float]:
        """Seconds of an action of each kind, without the reduction of gradients."""
        if schedule == SPLIT_SCHEDULE:
            regions = self._split_regions(layout.sharding)
        else:
            step = self._runs.measure(replace(layout.sharding, schedule=schedule))
            regions = first_regions(step)
        seconds = {}
        for kind, region in regions.items():
            costs = self._table.region(region)
            seconds[kind] = replay(costs).total
        return seconds


def first_regions(step: RankStep) -> dict[str, RecordedRegion]:
    """The regions of the first micro-batch, by kind of action."""
    regions = {}
    for key, region in step.actions.items():
        if key.place != "last":
            regions[key.kind] = region
    return regions


def _placed(region: RecordedRegion, layout: Layout) -> RecordedRegion:
    """The region with the groups of some axes at the distances of a layout."""
    strides = dict(layout.strides)
    moved: dict[int, Operation] = {}
    events: list[Event] = []
    for event in region.events:
        if isinstance(event, KernelLaunch) or event.op.axis not in strides:
            events.append(event)
            continue
        op = event.op
        identity = id(op)
        if identity not in moved:
            moved[identity] = _strided(op, strides[op.axis], layout.degree(op.axis))
        kind = Started if isinstance(event, Started) else Ended
        events.append(kind(moved[identity]))
    return replace(region, events=events)


def _strided(op: Operation, stride: int, degree: int) -> Operation:
    """The operation over as many ranks, at this distance from each other; a message is between the
    ends of its ring, which are on different nodes where any neighbours are.
    """
    places = (0, degree - 1) if op.is_p2p else range(len(op.group))
    group = tuple(place * stride for place in places)
    return replace(op, group=group)


def block_segments(region: RecordedRegion) -> dict[str, BlockSegments]:
    """What runs in a region, by block."""
    ends = [
        _SegmentEnd(following.first_event, following.entry_bytes)
        for following in region.segments[1:]
    ]
    ends.append(_SegmentEnd(len(region.events), region.exit_bytes))
    found: dict[str, BlockSegments] = {}
    for segment, end in zip(region.segments, ends, strict=True):
        known = found.get(segment.block, BlockSegments(segment.block))
        events = region.events[segment.first_event : end.event]
        change = end.level_bytes - segment.entry_bytes
        peak = segment.peak_bytes - segment.entry_bytes
        found[segment.block] = BlockSegments(
            block=segment.block,
            events=(*known.events, events),
            change_bytes=known.change_bytes + change,
            peak_bytes=max(known.peak_bytes, peak),
        )
    return found


@dataclass(frozen=True)
class _SegmentEnd:
    """The event behind a segment, and the bytes that live then."""

    event: int
    level_bytes: int
