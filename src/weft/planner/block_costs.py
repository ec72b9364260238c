"""Costs of each kind of block under a sharding: seconds, saved bytes and peaks for one micro-batch, measured and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.comm.observe import Operation
from weft.parallel.cp import AXIS as CP
from weft.parallel.ep import AXIS as EP
from weft.parallel.tp import AXIS as TP
from weft.planner.candidates import MICRO_SIZES
from weft.planner.kernels import KernelLaunch
from weft.planner.layout_choice import DEFAULT_CONTEXT, DEFAULT_SCHEDULE, Layout
from weft.planner.rank_step import RankStep
from weft.planner.recorder import Ended, Event, RecordedRegion, Started
from weft.planner.region_costs import CostTable
from weft.planner.region_time import replay
from weft.planner.short_runs import ShortRuns
from weft.planner.step_memory import boundary_bytes
from weft.schedule.actions import Act
from weft.schedule.lower import Transfer

LARGEST_MICRO = max(MICRO_SIZES)
SPLIT_SCHEDULE = "zero_bubble"
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


class BlockMeasurements:
    """Costs of blocks, each sharding measured once."""

    def __init__(self, runs: ShortRuns, table: CostTable) -> None:
        self._runs = runs
        self._table = table
        self._measured: dict[Layout, _MeasuredBlocks] = {}
        self._blocks: dict[object, CostsByKind] = {}
        self._bounds: dict[tuple[Layout, bool], CostsByKind] = {}
        self._splits: dict[Layout, SplitShares] = {}

    def of(self, layout: Layout) -> CostsByKind:
        """The costs of each kind of block under the sharding of a layout, with the ranks of its
        groups where the layout has them.
        """
        key = layout.sharding, layout.strides
        if key not in self._blocks:
            self._blocks[key] = self._costs_of(self._measure(layout), dict(layout.strides))
        return self._blocks[key]

    def boundary_bytes(self, layout: Layout) -> int:
        """Bytes of the output of a stage for one micro-batch."""
        return self._measure(layout).boundary_bytes

    def bounds(self, layout: Layout, *, has_own_recompute: bool = False) -> CostsByKind:
        """What each kind of block costs at least, from larger blocks: no part of a sequence or a
        batch costs less than its share of the whole, and recomputation adds to the time.

        Args:
            has_own_recompute: from blocks with the recomputation of the layout: the bytes that it
                saves are bounded, too.
        """
        degrees = [(axis, layout.degree(axis)) for axis in (EP, TP)]
        inner = tuple(item for item in degrees if item[1] > 1)
        recompute = layout.recompute if has_own_recompute else "none"
        whole = Layout(
            inner,
            recompute=recompute,
            sequence=layout.sequence,
            context=DEFAULT_CONTEXT,
            micro_size=LARGEST_MICRO,
        )
        key = layout.sharding, has_own_recompute
        if key not in self._bounds:
            share = layout.micro_size / LARGEST_MICRO / layout.degree(CP)
            measured = self.of(whole)
            is_same = recompute == layout.recompute
            repeats = layout.recompute == "full" and not is_same
            found = {}
            for kind, costs in measured.items():
                again_s = costs.forward_s if repeats and "layer" in kind else 0.0
                memory_share = share if is_same else 0.0
                found[kind] = BlockCosts(
                    forward_s=share * costs.forward_s,
                    backward_s=share * (costs.backward_s + again_s),
                    saved_bytes=int(memory_share * costs.saved_bytes),
                    forward_peak=int(memory_share * costs.forward_peak),
                    backward_peak=int(memory_share * costs.backward_peak),
                )
            self._bounds[key] = found
        return self._bounds[key]

    def _measure(self, layout: Layout) -> _MeasuredBlocks:
        sharding = layout.sharding
        if sharding not in self._measured:
            step = self._runs.measure(sharding)
            regions = first_regions(step)
            self._measured[sharding] = _MeasuredBlocks(
                names=step.plan.stages[0].blocks,
                forward=regions["F"],
                backward=regions["B"],
                boundary_bytes=boundary_bytes(step.plan, Transfer(Act("F", 0, 0), 0)),
            )
        return self._measured[sharding]

    def _costs_of(self, measured: _MeasuredBlocks, strides: Mapping[str, int]) -> CostsByKind:
        forward = _segment_seconds(_placed(measured.forward, strides), self._table)
        backward = _segment_seconds(_placed(measured.backward, strides), self._table)
        saved = _segment_changes(measured.forward)
        forward_peaks = _segment_peaks(measured.forward)
        backward_peaks = _segment_peaks(measured.backward)
        found = {}
        for name in measured.names:
            found[name] = BlockCosts(
                forward_s=forward.get(name, 0.0),
                backward_s=backward.get(name, 0.0),
                saved_bytes=saved.get(name, 0),
                forward_peak=forward_peaks.get(name, 0),
                backward_peak=backward_peaks.get(name, 0),
            )
        return found

    def split_shares(self, layout: Layout) -> SplitShares:
        """Of a backward, measured once for each degree of tp and ep, and recomputation."""
        degrees = [(axis, layout.degree(axis)) for axis in (EP, TP)]
        inner = tuple(item for item in degrees if item[1] > 1)
        key = Layout(inner, recompute=layout.recompute)
        if key not in self._splits:
            whole = self._backward_seconds(layout, DEFAULT_SCHEDULE)
            split = self._backward_seconds(layout, SPLIT_SCHEDULE)
            self._splits[key] = SplitShares(split["I"] / whole["B"], split["W"] / whole["B"])
        return self._splits[key]

    def _backward_seconds(self, layout: Layout, schedule: str) -> dict[str, float]:
        """Seconds of an action of each kind, without the reduction of gradients."""
        step = self._runs.measure(replace(layout.sharding, schedule=schedule))
        seconds = {}
        for kind, region in first_regions(step).items():
            seconds[kind] = replay(self._table.region(region)).total
        return seconds


def first_regions(step: RankStep) -> dict[str, RecordedRegion]:
    """The regions of the first micro-batch, by kind of action."""
    regions = {}
    for key, region in step.actions.items():
        if key.place != "last":
            regions[key.kind] = region
    return regions


def _placed(region: RecordedRegion, strides: Mapping[str, int]) -> RecordedRegion:
    """The region with the groups of some axes at other distances."""
    moved: dict[int, Operation] = {}
    events: list[Event] = []
    for event in region.events:
        if not isinstance(event, KernelLaunch) and event.op.axis in strides:
            op = event.op
            stride = strides[op.axis]
            group = tuple(place * stride for place in range(len(op.group)))
            op = moved.setdefault(id(op), replace(op, group=group))
            event = Started(op) if isinstance(event, Started) else Ended(op)
        events.append(event)
    return replace(region, events=events)


def _segment_seconds(region: RecordedRegion, table: CostTable) -> dict[str, float]:
    """Seconds of each block in a region."""
    seconds: dict[str, float] = {}
    stops = [segment.first_event for segment in region.segments[1:]]
    for segment, stop in zip(region.segments, [*stops, len(region.events)], strict=True):
        part = replace(region, events=region.events[segment.first_event : stop])
        time = replay(table.region(part)).total
        seconds[segment.block] = seconds.get(segment.block, 0.0) + time
    return seconds


def _segment_changes(region: RecordedRegion) -> dict[str, int]:
    """Bytes that each block leaves."""
    changes: dict[str, int] = {}
    levels = [segment.entry_bytes for segment in region.segments[1:]]
    for segment, level in zip(region.segments, [*levels, region.exit_bytes], strict=True):
        change = level - segment.entry_bytes
        changes[segment.block] = changes.get(segment.block, 0) + change
    return changes


def _segment_peaks(region: RecordedRegion) -> dict[str, int]:
    """Most bytes that live during each block above those at its begin."""
    peaks: dict[str, int] = {}
    for segment in region.segments:
        peak = segment.peak_bytes - segment.entry_bytes
        peaks[segment.block] = max(peaks.get(segment.block, 0), peak)
    return peaks
