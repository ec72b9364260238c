"""What the gradient reduction and the ZeRO stages add to the blocks of a rank: bytes, kernels and collectives a parameter.

Note [Costs of a parameter]
    A short run is measured on two and on four data ranks, and on one. What a rank holds or computes
    for a parameter is `whole` bytes (or seconds) on every rank, and `shared` ones over all ranks that
    have it; two runs give both. Kernels and peaks count above those of the run on one rank, which
    the costs of blocks have already. Peaks of a forward are those of a block between equal ones, and
    with an equal one behind these: with ZeRO 3 its parameters and those of the next block are gathered
    meanwhile, and those of the second next one before that begins. Peaks of a backward are those of a
    block with two equal ones behind it, whose gradients are being reduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from weft.comm.observe import Operation
from weft.core.zero_stages import MAX_UNDER_WAY, ZERO_THAT_REDUCES_EACH
from weft.parallel.dp import AXIS as DP
from weft.parallel.fsdp import AXIS as FSDP
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.recorder import BlockSegment, Event, RecordedRegion, Started
from weft.planner.simulate.region_costs import CostTable
from weft.planner.simulate.speeds import Speeds
from weft_plan.search.layout_choice import Layout
from weft_plan.search.short_runs import NUM_MICROBATCHES, ShortRuns

NUM_COPIES = 4
"""Blocks of each kind in a short run, so that one of them is between equal ones, with one more behind."""
LIVE_GRADIENTS = MAX_UNDER_WAY + 1
"""Blocks with whole gradients at once: the one whose backward runs, and those being reduced."""

Part = Literal["forward", "backward", "last backward", "update"]
PARTS: tuple[Part, ...] = ("forward", "backward", "last backward", "update")


@dataclass(frozen=True)
class ParamCost:
    """An amount for each parameter of a rank; see Note [Costs of a parameter]."""

    whole: float
    shared: float = 0.0

    def of(self, params: float, num_data: int) -> float:
        """Of so many parameters, where so many data ranks share them."""
        return params * (self.whole + self.shared / num_data)


@dataclass(frozen=True)
class ZeroCosts:
    """Costs of one ZeRO stage.

    Attributes:
        states: bytes between steps, and of gradients that stay from one micro-batch to the next.
        forward_peak: bytes during a block, above those of the block on one rank, and without what
            is `carried`.
        backward_peak: the same for each parameter of `LIVE_GRADIENTS` blocks, on their average.
        carried: bytes that a backward leaves to the next actions, of gradients that are being
            reduced, for each parameter of `MAX_UNDER_WAY` blocks.
        kernels: seconds of each part, above those of the first micro-batch on one rank.
        operations: collectives of each part, on two data ranks.
        params: of the short run.
        num_blocks: of them that have parameters.
        known_seconds: of collectives, by their sizes.
    """

    states: ParamCost
    forward_peak: ParamCost
    backward_peak: ParamCost
    carried: ParamCost
    kernels: Mapping[Part, ParamCost]
    operations: Mapping[Part, Counter[Operation]]
    params: float
    num_blocks: int
    known_seconds: dict[object, float] = field(default_factory=dict, compare=False)

    def sent_s(
        self, part: Part, speeds: Speeds, group: tuple[int, ...], *, params: float, num_blocks: int
    ) -> float:
        """Seconds of the collectives of a part over a group of ranks.

        Args:
            params: of the blocks.
            num_blocks: that have parameters.
        """
        if len(group) == 1 or not num_blocks:
            return 0.0
        key = part, group, params, num_blocks
        known = self.known_seconds.get(key)
        if known is not None:
            return known
        repeats = num_blocks / self.num_blocks
        share = params / self.params / repeats
        sent = share * 2.0 * (len(group) - 1) / len(group)
        seconds = 0.0
        for op, count in self.operations[part].items():
            sent_bytes = round(sent * op.sent_bytes)
            resized = replace(op, group=group, sent_bytes=sent_bytes)
            seconds += count * speeds.operation_s(resized)
        total = repeats * seconds
        self.known_seconds[key] = total
        return total


@dataclass(frozen=True)
class CopyCosts:
    """Collectives over the ranks that have copies of sharded states, of one ZeRO stage.

    Attributes:
        operations: of all backwards of a short run, on two ranks with copies of shards of two ranks.
        num_reductions: backwards that reduce gradients.
        params: of the short run.
        num_blocks: of them that have parameters.
    """

    operations: Counter[Operation]
    num_reductions: int
    params: float
    num_blocks: int

    def sent_s(
        self,
        speeds: Speeds,
        group: tuple[int, ...],
        *,
        params: float,
        num_blocks: int,
        num_shards: int,
    ) -> float:
        """Seconds of the collectives of a backward that reduces gradients.

        Args:
            group: ranks with copies.
            params: of the blocks.
            num_blocks: that have parameters.
            num_shards: ranks that share states.
        """
        if not num_blocks:
            return 0.0
        repeats = num_blocks / self.num_blocks
        share = params / self.params / repeats * 2 / num_shards
        sent = share * 2.0 * (len(group) - 1) / len(group)
        seconds = 0.0
        for op, count in self.operations.items():
            resized = replace(op, group=group, sent_bytes=round(sent * op.sent_bytes))
            seconds += count * speeds.operation_s(resized)
        return repeats * seconds / self.num_reductions


@dataclass(frozen=True)
class _ShortStep:
    """A short run and what is read of it."""

    step: RankStep
    zero: int

    def region(self, kind: str, place: str) -> RecordedRegion:
        for key, region in self.step.actions.items():
            if key.kind == kind and key.place == place:
                return region
        raise AssertionError(f"two micro-batches have a {kind} at the {place} place")

    @property
    def change_bytes(self) -> int:
        """Bytes that the first micro-batch leaves."""
        forward = self.region("F", "first")
        backward = self.region("B", "first")
        return max(0, forward.change + backward.change)

    @property
    def left_bytes(self) -> int:
        """Gradients that the first micro-batch leaves, where they are not reduced at once."""
        if self.zero >= ZERO_THAT_REDUCES_EACH:
            return 0
        return self.change_bytes

    @property
    def base_bytes(self) -> int:
        """Bytes at the begin of the step, and gradients that stay."""
        return self.step.regions[0].entry_bytes + self.left_bytes

    @property
    def state_bytes(self) -> int:
        return self.step.kept.total + self.left_bytes

    def peak(self, kind: str, block: str) -> int:
        """Bytes during a block of the last micro-batch, without gradients that stay."""
        segment = self._segment(kind, "last", block)
        return segment.peak_bytes - self.base_bytes

    def peak_of_first(self, kind: str, block: str) -> int:
        """The level at which a block of the last micro-batch begins, and above it the peak of the
        block in the first one, whose gradients are new.
        """
        first = self._segment(kind, "first", block)
        last = self._segment(kind, "last", block)
        begin = last.entry_bytes - self.base_bytes
        return begin + first.peak_bytes - first.entry_bytes

    def _segment(self, kind: str, place: str, block: str) -> BlockSegment:
        segments = self.region(kind, place).segments
        own = [segment for segment in segments if segment.block == block]
        return max(own, key=lambda segment: segment.peak_bytes)

    def events(self, part: Part) -> Sequence[Event]:
        """Kernels and collectives of a part."""
        if part == "update":
            return self.step.phases["update"].events
        if part == "forward":
            return self.region("F", "first").events
        place = "first" if part == "backward" else "last"
        return self.region("B", place).events

    def kernels_s(self, part: Part, table: CostTable) -> float:
        seconds = 0.0
        for event in self.events(part):
            if isinstance(event, KernelLaunch):
                seconds += table.kernel_s(event)
        return seconds

    def operations_along(self, axis: str) -> Counter[Operation]:
        """Collectives of the whole step along one axis."""
        started: Counter[Operation] = Counter()
        for region in self.step.regions:
            for event in region.events:
                if isinstance(event, Started) and event.op.axis == axis:
                    started[event.op] += 1
        return started

    def operations(self, part: Part) -> Counter[Operation]:
        """Collectives that a part starts."""
        started: Counter[Operation] = Counter()
        for event in self.events(part):
            if isinstance(event, Started):
                started[event.op] += 1
        return started


@dataclass(frozen=True)
class _Comparison:
    """Steps of a ZeRO stage beside the step on one rank.

    Attributes:
        alone: on one rank.
        steps: of the stage, on two and on four data ranks, or on one.
        table: seconds of kernels.
    """

    alone: _ShortStep
    steps: tuple[_ShortStep, ...]
    table: CostTable

    def peaks(self, kind: str, block: str) -> list[float]:
        """Of each step, bytes during the block above those on one rank."""
        base = self.alone.peak_of_first(kind, block)
        return [step.peak(kind, block) - base for step in self.steps]

    def kernels_s(self, part: Part) -> list[float]:
        """Of each step, seconds of kernels above those of the first micro-batch on one rank."""
        seconds = [step.kernels_s(part, self.table) for step in self.steps]
        if part == "update":
            return seconds
        base: Part = "forward" if part == "forward" else "backward"
        base_s = self.alone.kernels_s(base, self.table)
        above = [each - base_s for each in seconds]
        is_reduced_once = self.steps[0].zero < ZERO_THAT_REDUCES_EACH
        if part == "backward" and is_reduced_once:
            # the backward that adds to gradients, as the last one does
            added_s = self.alone.kernels_s("last backward", self.table) - base_s
            return [each + added_s for each in above]
        return above


class ZeroMeasurements:
    """Costs of the ZeRO stages, each measured once."""

    def __init__(self, runs: ShortRuns, table: CostTable) -> None:
        self._runs = runs
        self._table = table
        self._steps: dict[tuple[int, int], _ShortStep] = {}
        self._costs: dict[tuple[int, bool], ZeroCosts] = {}
        self._copies: dict[int, CopyCosts] = {}

    def of(self, zero: int, *, num_data: int) -> ZeroCosts:
        """The costs of a ZeRO stage on so many data ranks."""
        key = zero, num_data > 1
        if key not in self._costs:
            self._costs[key] = self._shared(zero) if num_data > 1 else self._alone(zero)
        return self._costs[key]

    def copies(self, zero: int) -> CopyCosts:
        """The costs of copies of shards under a ZeRO stage."""
        if zero not in self._copies:
            layout = Layout(((DP, 2), (FSDP, 2)), zero=zero)
            step = self._runs.measure(layout, copies=NUM_COPIES)
            sizes = [self._num_params(name) for name in step.plan.stages[0].blocks]
            is_reduced_once = zero < ZERO_THAT_REDUCES_EACH
            self._copies[zero] = CopyCosts(
                operations=_ShortStep(step, zero).operations_along(DP),
                num_reductions=1 if is_reduced_once else NUM_MICROBATCHES,
                params=sum(sizes),
                num_blocks=sum(size > 0 for size in sizes),
            )
        return self._copies[zero]

    def _step(self, zero: int, num_data: int) -> _ShortStep:
        key = zero, num_data
        if key not in self._steps:
            degrees = ((DP, num_data),) if num_data > 1 else ()
            step = self._runs.measure(Layout(degrees, zero=zero), copies=NUM_COPIES)
            self._steps[key] = _ShortStep(step, zero)
        return self._steps[key]

    def _alone(self, zero: int) -> ZeroCosts:
        return self._costs_of(self._step(zero, 1), None)

    def _shared(self, zero: int) -> ZeroCosts:
        return self._costs_of(self._step(zero, 2), self._step(zero, 4))

    def _costs_of(self, first: _ShortStep, second: _ShortStep | None) -> ZeroCosts:
        """From steps on two and on four data ranks, or on one."""
        steps = (first,) if second is None else (first, second)
        blocks = first.step.plan.stages[0].blocks
        sizes = [self._num_params(name) for name in blocks]
        sizes_above_0 = [size for size in sizes if size]
        params = sum(sizes)
        equal = self._equal_blocks(blocks)
        middle = equal[(len(equal) - 1) // 2]
        before_equal = equal[max(0, len(equal) - LIVE_GRADIENTS)]
        sizes_behind = sizes[blocks.index(before_equal) :]
        live = [size for size in sizes_behind if size][:LIVE_GRADIENTS]
        comparison = _Comparison(self._step(0, 1), steps, self._table)
        kernels = {}
        operations = {}
        for part in PARTS:
            kernels[part] = _fitted(comparison.kernels_s(part), params)
            operations[part] = first.operations(part)
        states = [step.state_bytes for step in steps]
        carried = [step.change_bytes - step.left_bytes for step in steps]
        forward_peaks = comparison.peaks("F", middle)
        above_carried = [peak - left for peak, left in zip(forward_peaks, carried, strict=True)]
        return ZeroCosts(
            carried=_fitted(carried, sum(sizes_above_0[:MAX_UNDER_WAY])),
            states=_fitted(states, params),
            forward_peak=_fitted(above_carried, self._num_params(middle)),
            backward_peak=_fitted(comparison.peaks("B", before_equal), sum(live) / LIVE_GRADIENTS),
            kernels=kernels,
            operations=operations,
            params=params,
            num_blocks=len(sizes_above_0),
        )

    def _num_params(self, block: str) -> float:
        """Parameters of a block, without tensor and expert parallelism."""
        by_kind = self._runs.sizes_of_kinds(tp=1, ep=1)
        kind = self._runs.kinds[block]
        return by_kind[kind].total

    def _equal_blocks(self, blocks: Sequence[str]) -> list[str]:
        """Those of the most frequent kind of block that has parameters."""
        members: dict[str, list[str]] = {}
        for name in blocks:
            kind = self._runs.kinds[name]
            members.setdefault(kind, []).append(name)

        def preference(names: list[str]) -> tuple[bool, int, float]:
            num_params = self._num_params(names[0])
            return num_params > 0, len(names), num_params

        return max(members.values(), key=preference)


def _fitted(values: Sequence[float], params: float) -> ParamCost:
    """From the values on two and on four data ranks, or on one alone; 0 without parameters."""
    if not params:
        return ParamCost(0.0)
    if len(values) == 1:
        return ParamCost(values[0] / params)
    halved, quartered = values
    shared = 4.0 * (halved - quartered)
    whole = halved - shared / 2
    return ParamCost(whole / params, shared / params)
