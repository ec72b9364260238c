"""Costs of a deep stage from a short one: of a run of equal blocks five are measured, and the middle one is repeated.

Note [Repeated blocks]
    What happens while a block computes depends on its neighbours: ZeRO 3 gathers the parameters of
    the next block meanwhile, and gradients of the blocks before it are still being reduced. Of five
    equal blocks in a row the middle one has two equal blocks on either side, in a forward and in a
    backward, so any number of them could stand at its place. What belongs to no block (the
    reduction, the optimizer, weight gradients of a split backward) is measured with one block more;
    the difference is added for each block that was left out. Where one block more changes
    something else, as buckets of gradients over several blocks do, all blocks are measured.
    The result equals that of all blocks, to the byte (tests/planner/test_repeated.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from weft.comm.observe import Operation
from weft.config.run import Run
from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.planner.kernels import KernelLaunch
from weft.planner.rank_step import ActionKey, KeptBytes, RankStep, measure_rank
from weft.planner.recorder import BlockSegment, Ended, Event, RecordedRegion, Started

KEPT_BLOCKS = 5
"""Blocks of a run that are measured; see Note [Repeated blocks]."""
NEIGHBOURS = 2
"""Blocks on either side that have an effect on one."""


class NotPeriodicError(Exception):
    """One block more changes something else than the costs of a block."""


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks in a row in one stage.

    Attributes:
        stage: of the pipeline.
        kind: name of the first block of the model that equals them.
        names: of the blocks.
    """

    stage: int
    kind: str
    names: tuple[str, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The blocks that are not measured."""
        return self.dropped(KEPT_BLOCKS)

    def dropped(self, kept: int) -> tuple[str, ...]:
        """All but the first three and the last ones, where `kept` are measured."""
        if len(self.names) <= kept:
            return ()
        start = NEIGHBOURS + 1
        return self.names[start : start - kept]


def block_runs(plan: Plan, row: int, kinds: Mapping[str, str]) -> list[BlockRun]:
    """The runs of equal blocks in the stages of a pipeline coordinate.

    Args:
        kinds: name of a block -> name of the first block that equals it.
    """
    runs = []
    for stage in plan.table.stages(row):
        for kind, members in groupby(plan.stages[stage].blocks, key=kinds.__getitem__):
            runs.append(BlockRun(stage, kind, tuple(members)))
    return runs


def measure_repeated(run: Run, plan: Plan, row: int, kinds: Mapping[str, str]) -> RankStep:
    """What `measure_rank` measures of the rank at a pipeline coordinate, from fewer blocks.

    Args:
        plan: of the run.
        kinds: name of a block -> name of the first block that equals it.
    """
    rank = plan.mesh.rank(**{pipeline_axis(): row})
    runs = block_runs(plan, row, kinds)
    if can_be_repeated(plan) and any(each.left_out for each in runs):
        try:
            return _extended(run, plan, rank, runs)
        except NotPeriodicError:
            pass
    return measure_rank(run, rank, plan=plan)


def can_be_repeated(plan: Plan) -> bool:
    """Whether blocks may be left out. Weight gradients of split backwards belong to no block, so a
    rank must have one stage; under sequence parallelism without ZeRO one bucket holds the norms of
    all blocks.
    """
    has_long_buckets = plan.zero == 0 and plan.sequence_parallel
    has_split_chunks = bool(plan.table.splits) and plan.chunks > 1
    return not has_split_chunks and not has_long_buckets


@dataclass(frozen=True)
class _Longer:
    """A rank with one block more of a kind.

    Attributes:
        run: that has it.
        step: what the rank was measured to do.
        count: how many blocks of the kind are to be added.
    """

    run: BlockRun
    step: RankStep
    count: int


def _extended(run: Run, plan: Plan, rank: int, runs: Sequence[BlockRun]) -> RankStep:
    """The step of the whole rank.

    Raises:
        NotPeriodicError: see there.
    """
    short = measure_rank(run, rank, plan=_shortened(plan, runs))
    longer = [
        _Longer(longest, measure_rank(run, rank, plan=_shortened(plan, runs, longest)), count)
        for longest, count in _counts(runs)
    ]
    stages = plan.table.stages(short.row)
    actions = {}
    for key, region in short.actions.items():
        if key.kind == "W":
            actions[key] = _grown_region(region, _regions(longer, _action(key)))
            continue
        of_stage = [each for each in runs if each.stage == stages[key.chunk]]
        whole = _with_left_out(region, of_stage, is_forward=key.kind == "F")
        change = region.change
        for each in longer:
            changed_key = replace(key, chunk=stages.index(each.run.stage))
            one_more = each.step.actions[changed_key].change - short.actions[changed_key].change
            num_left_out = [len(own.left_out) for own in of_stage if own.kind == each.run.kind]
            change += one_more * sum(num_left_out)
        actions[key] = replace(whole, exit_bytes=region.entry_bytes + change)
    phases = {}
    for name, region in short.phases.items():
        phases[name] = _grown_region(region, _regions(longer, _phase(name)))
    num_dispatches = short.num_dispatches
    for each in longer:
        num_dispatches += each.count * (each.step.num_dispatches - short.num_dispatches)
    return replace(
        short,
        plan=plan,
        kept=_grown_kept(short.kept, longer),
        actions=actions,
        phases=phases,
        num_dispatches=num_dispatches,
        regions=(),
    )


def _counts(runs: Sequence[BlockRun]) -> Iterator[tuple[BlockRun, int]]:
    """For each kind of block the longest run, and how many blocks of all runs are left out."""
    counts: Counter[str] = Counter()
    for each in runs:
        counts[each.kind] += len(each.left_out)
    for kind, count in counts.items():
        if count:
            of_kind = [each for each in runs if each.kind == kind]
            yield max(of_kind, key=lambda each: len(each.names)), count


def _shortened(plan: Plan, runs: Sequence[BlockRun], longer: BlockRun | None = None) -> Plan:
    """The plan without the blocks that are left out; with one more of the run `longer`."""
    dropped: set[str] = set()
    for each in runs:
        dropped.update(each.dropped(KEPT_BLOCKS + (each is longer)))
    stages = []
    for stage in plan.stages:
        blocks = tuple(name for name in stage.blocks if name not in dropped)
        stages.append(stage.model_copy(update={"blocks": blocks}))
    return plan.model_copy(update={"stages": tuple(stages)})


# Blocks that are repeated


def _with_left_out(
    region: RecordedRegion, runs: Sequence[BlockRun], *, is_forward: bool
) -> RecordedRegion:
    """The region of an action with all blocks of its stage."""
    for each in runs:
        if each.left_out:
            middle = each.names[NEIGHBOURS:-NEIGHBOURS]
            names = middle if is_forward else middle[::-1]
            region = repeat_block(region, each.names[NEIGHBOURS], names)
    return region


def repeat_block(region: RecordedRegion, block: str, names: Sequence[str]) -> RecordedRegion:
    """The region with copies of a block's segment.

    Args:
        names: of the blocks that the segment and its copies stand for, in the order of time.

    Raises:
        NotPeriodicError: the block has not exactly one segment between others.
    """
    places = [place for place, each in enumerate(region.segments) if each.block == block]
    if len(places) != 1 or not 0 < places[0] < len(region.segments) - 1:
        raise NotPeriodicError
    repeater = _Repeater(region, places[0])
    for place, segment in enumerate(region.segments):
        if place != repeater.place:
            repeater.add(place, segment.block)
            continue
        for name in names:
            repeater.add(place, name)
            repeater.shift += repeater.change
        repeater.shift -= repeater.change
    return repeater.result()


@dataclass
class _Repeater:
    """Builds a region from the segments of another one.

    Attributes:
        place: of the segment that is repeated.
        shift: bytes that the copies so far have added.
    """

    region: RecordedRegion
    place: int
    shift: int = 0
    events: list[Event] = field(default_factory=list)
    segments: list[BlockSegment] = field(default_factory=list)

    @property
    def change(self) -> int:
        """Bytes that one copy adds."""
        segments = self.region.segments
        return segments[self.place + 1].entry_bytes - segments[self.place].entry_bytes

    def add(self, place: int, name: str) -> None:
        """Add a segment, or a copy of it."""
        segments = self.region.segments
        segment = segments[place]
        moved = replace(
            segment,
            block=name,
            first_event=len(self.events),
            entry_bytes=segment.entry_bytes + self.shift,
            peak_bytes=segment.peak_bytes + self.shift,
        )
        self.segments.append(moved)
        stop = segments[place + 1].first_event if place + 1 < len(segments) else None
        self.events.extend(self.region.events[segment.first_event : stop])

    def result(self) -> RecordedRegion:
        """The region of all segments that were added."""
        peak = max(self.segments, key=lambda segment: segment.peak_bytes)
        is_raised = peak.peak_bytes > self.region.entry_bytes
        return replace(
            self.region,
            exit_bytes=self.region.exit_bytes + self.shift,
            peak_bytes=max(peak.peak_bytes, self.region.entry_bytes),
            peak_block=peak.block if is_raised else "",
            peak_parts=peak.peak_parts if is_raised else {},
            events=linked(self.events, _started_ids(self.region.events)),
            segments=self.segments,
        )


# What belongs to no block


@dataclass(frozen=True)
class _LongerRegion:
    region: RecordedRegion
    count: int


RegionOf = Callable[[RankStep], RecordedRegion]


def _action(key: ActionKey) -> RegionOf:
    return lambda step: step.actions[key]


def _phase(name: str) -> RegionOf:
    return lambda step: step.phases[name]


def _regions(longer: Sequence[_Longer], region_of: RegionOf) -> list[_LongerRegion]:
    return [_LongerRegion(region_of(each.step), each.count) for each in longer]


def _grown_region(short: RecordedRegion, longer: Sequence[_LongerRegion]) -> RecordedRegion:
    """The region with the difference to each longer one added as often as that says."""
    change, workspace = short.change, short.workspace
    for each in longer:
        change += each.count * (each.region.change - short.change)
        workspace += each.count * (each.region.workspace - short.workspace)
    entry = short.entry_bytes
    return replace(
        short,
        exit_bytes=entry + change,
        peak_bytes=entry + max(workspace, change, 0),
        events=_grown_events(short.events, longer),
        segments=[],
    )


def _grown_events(events: Sequence[Event], longer: Sequence[_LongerRegion]) -> list[Event]:
    """The events with those of all blocks inserted, and the sizes of the others grown.

    Raises:
        NotPeriodicError: the events of one block more are not a part that is inserted.
    """
    inserted: dict[int, list[Event]] = {}
    grown = list(events)
    for each in longer:
        others = each.region.events
        for part in _differences(events, others):
            more = others[part.inserted] * each.count
            inserted.setdefault(part.place, []).extend(more)
            if part.longer is not None:
                sizes = _AddedSizes(events[part.place], others[part.longer], each.count)
                grown[part.place] = sizes.added_to(grown[part.place])
    result: list[Event] = []
    for index, event in enumerate(grown):
        result.extend(inserted.get(index, ()))
        result.append(event)
    result.extend(inserted.get(len(events), ()))
    own = _started_ids(events)
    for each in longer:
        own.update(_started_ids(each.region.events))
    return linked(result, own)


def _started_ids(events: Sequence[Event]) -> set[int]:
    return {id(event.op) for event in events if isinstance(event, Started)}


def linked(events: Sequence[Event], own: Collection[int]) -> list[Event]:
    """The events with operations of their own: each wait is for the earliest operation that equals
    its own and has not been waited for. A wait for an operation of an earlier region stays.

    Args:
        own: ids of operations that were started in the region.
    """
    under_way: dict[Operation, deque[Operation]] = {}
    result: list[Event] = []
    for event in events:
        if isinstance(event, Started):
            op = replace(event.op)
            under_way.setdefault(op, deque()).append(op)
            event = Started(op)
        elif isinstance(event, Ended) and id(event.op) in own and under_way.get(event.op):
            event = Ended(under_way[event.op].popleft())
        result.append(event)
    return result


@dataclass(frozen=True)
class _EventDifference:
    """A place at which a longer list of events differs from a short one.

    Attributes:
        place: in the short list, before which events are inserted, or of an event that has grown.
        inserted: places of inserted events in the longer list.
        longer: place of the grown event in the longer list; None for an insertion.
    """

    place: int
    inserted: slice
    longer: int | None = None


def _differences(events: Sequence[Event], others: Sequence[Event]) -> Iterator[_EventDifference]:
    """How `others` differs from `events`.

    Raises:
        NotPeriodicError: by something else than insertions and sizes.
    """
    place, other_place = 0, 0
    while place < len(events) or other_place < len(others):
        if _num_equal(events[place:], others[other_place:]):
            place += 1
            other_place += 1
            continue
        num_more = (len(others) - other_place) - (len(events) - place)
        num_inserted = _period(others, other_place, num_more)
        if not num_inserted:
            num_inserted = _num_inserted(events[place:], others[other_place:], num_more)
        if num_inserted:
            inserted = slice(other_place, other_place + num_inserted)
            yield _EventDifference(place, inserted)
            other_place += num_inserted
        elif _kind_at(events, place) == _kind_at(others, other_place):
            yield _EventDifference(place, slice(0, 0), other_place)
            place += 1
            other_place += 1
        else:
            raise NotPeriodicError


def _period(events: Sequence[Event], place: int, most: int) -> int:
    """The smallest number of events before this place that equal as many behind it; 0 if none do."""
    for length in range(1, min(most, place) + 1):
        before = events[place - length : place]
        if _num_equal(before, events[place : place + length]) == length:
            return length
    return 0


def _num_inserted(events: Sequence[Event], others: Sequence[Event], most: int) -> int:
    """How many of `others` must be skipped for the longest start that equals that of `events`."""
    if not events:
        return most
    counts = {skipped: _num_equal(events, others[skipped:]) for skipped in range(1, most + 1)}
    longest = max(counts.values(), default=0)
    return next((skipped for skipped, count in counts.items() if 0 < count == longest), 0)


def _num_equal(events: Sequence[Event], others: Sequence[Event]) -> int:
    """Number of equal events at the begin of both."""
    count = 0
    for event, other in zip(events, others, strict=False):
        if type(event) is not type(other) or event != other:
            break
        count += 1
    return count


def _kind_at(events: Sequence[Event], place: int) -> tuple[object, ...] | None:
    return _kind(events[place]) if place < len(events) else None


def _kind(event: Event) -> tuple[object, ...]:
    """What an event is, besides sizes."""
    if isinstance(event, KernelLaunch):
        return event.kind, event.dtype, len(event.sizes)
    return type(event), event.op.op, event.op.axis, event.op.group


@dataclass(frozen=True)
class _AddedSizes:
    """The sizes that `count` blocks more add to an event, where one makes `longer` of `short`."""

    short: Event
    longer: Event
    count: int

    def added_to(self, event: Event) -> Event:
        """The event with these sizes more."""
        short, longer, count = self.short, self.longer, self.count
        if isinstance(event, KernelLaunch):
            assert isinstance(short, KernelLaunch)
            assert isinstance(longer, KernelLaunch)
            sizes = zip(event.sizes, short.sizes, longer.sizes, strict=True)
            return replace(
                event,
                flops=event.flops + count * (longer.flops - short.flops),
                num_bytes=event.num_bytes + count * (longer.num_bytes - short.num_bytes),
                sizes=tuple(now + count * (after - before) for now, before, after in sizes),
            )
        assert not isinstance(short, KernelLaunch)
        assert not isinstance(longer, KernelLaunch)
        payload = longer.op.payload_bytes - short.op.payload_bytes
        sent = longer.op.sent_bytes - short.op.sent_bytes
        op = replace(
            event.op,
            payload_bytes=event.op.payload_bytes + count * payload,
            sent_bytes=event.op.sent_bytes + count * sent,
        )
        return type(event)(op)


def _grown_kept(short: KeptBytes, longer: Sequence[_Longer]) -> KeptBytes:
    names = ("params", "gradients", "optimizer", "buffers")
    sizes = {name: getattr(short, name) for name in names}
    for each in longer:
        for name in names:
            more = getattr(each.step.kept, name) - getattr(short, name)
            sizes[name] += each.count * more
    return KeptBytes(**sizes)
