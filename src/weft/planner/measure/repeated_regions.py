"""A recorded region with more blocks: copies of a block's segment, and events that belong to no block, grown by differences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from weft.comm.observe import Operation
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.recorder import BlockSegment, Ended, Event, RecordedRegion, Started


class NotPeriodicError(Exception):
    """One block more changes something else than the costs of a block."""


def repeat_block(region: RecordedRegion, block: str, names: Sequence[str]) -> RecordedRegion:
    """The region with copies of a block's segment.

    Args:
        names: of the blocks that the segment and its copies stand for, in the order of time.

    Raises:
        NotPeriodicError: the block has not exactly one segment between others.
    """
    places = [place for place, each in enumerate(region.segments) if each.block == block]
    if len(places) != 1:
        raise NotPeriodicError
    repeated = places[0]
    last = len(region.segments) - 1
    if not 0 < repeated < last:
        raise NotPeriodicError
    repeater = _Repeater(region, repeated)
    for place, segment in enumerate(region.segments):
        if place == repeated:
            repeater.add_copies(names)
        else:
            repeater.add(place, segment.block)
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

    def add_copies(self, names: Sequence[str]) -> None:
        """Add the repeated segment once for each name; later segments are shifted by the others."""
        for name in names:
            self.add(self.place, name)
            self.shift += self.change
        self.shift -= self.change

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
        following = segments[place + 1 :]
        stop = following[0].first_event if following else None
        events = self.region.events[segment.first_event : stop]
        self.events.extend(events)

    def result(self) -> RecordedRegion:
        """The region of all segments that were added."""
        entry_bytes = self.region.entry_bytes
        peak = max(self.segments, key=lambda segment: segment.peak_bytes)
        is_raised = peak.peak_bytes > entry_bytes
        return replace(
            self.region,
            exit_bytes=self.region.exit_bytes + self.shift,
            peak_bytes=max(peak.peak_bytes, entry_bytes),
            peak_block=peak.block if is_raised else "",
            peak_parts=peak.peak_parts if is_raised else {},
            events=linked(self.events, _started_ids(self.region.events)),
            segments=self.segments,
        )


@dataclass(frozen=True)
class LongerRegion:
    """A region of a rank with one block more of a kind, and how many such blocks are to be added."""

    region: RecordedRegion
    count: int


def grown_region(short: RecordedRegion, longer: Sequence[LongerRegion]) -> RecordedRegion:
    """The region with the difference to each longer one added as often as that says."""
    change = short.change
    workspace = short.workspace
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


def _grown_events(events: Sequence[Event], longer: Sequence[LongerRegion]) -> list[Event]:
    """The events with those of all blocks inserted, and the sizes of the others grown.

    Raises:
        NotPeriodicError: the events of one block more are not a part that is inserted.
    """
    growth = _Growth(list(events))
    own = _started_ids(events)
    for each in longer:
        growth.add(events, each)
        own.update(_started_ids(each.region.events))
    return linked(growth.result(), own)


@dataclass
class _Growth:
    """Events to which blocks are added.

    Attributes:
        events: with the sizes of all blocks so far.
        inserted: events of the blocks, by the place of the event before which they stand.
    """

    events: list[Event]
    inserted: dict[int, list[Event]] = field(default_factory=dict)

    def add(self, short: Sequence[Event], longer: LongerRegion) -> None:
        """Add blocks of one kind.

        Raises:
            NotPeriodicError: the events of one block more are not a part that is inserted.
        """
        others = longer.region.events
        for part in _differences(short, others):
            before = self.inserted.setdefault(part.place, [])
            before.extend(others[part.inserted] * longer.count)
            if part.longer is not None:
                sizes = _AddedSizes(short[part.place], others[part.longer], longer.count)
                self.events[part.place] = sizes.added_to(self.events[part.place])

    def result(self) -> list[Event]:
        """The events of all blocks."""
        result: list[Event] = []
        for place, event in enumerate(self.events):
            result.extend(self.inserted.get(place, ()))
            result.append(event)
        at_end = self.inserted.get(len(self.events), ())
        result.extend(at_end)
        return result


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
            started = replace(event.op)
            result.append(Started(started))
            under_way.setdefault(started, deque()).append(started)
            continue
        if isinstance(event, Ended) and id(event.op) in own:
            equal = under_way.get(event.op)
            if equal:
                event = Ended(equal.popleft())
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
    place = 0
    other_place = 0
    while place < len(events) or other_place < len(others):
        rest = events[place:]
        other_rest = others[other_place:]
        if _num_equal(rest, other_rest):
            place += 1
            other_place += 1
            continue
        num_more = len(other_rest) - len(rest)
        num_inserted = _period(others, other_place, num_more)
        if not num_inserted:
            num_inserted = _num_inserted(rest, other_rest, num_more)
        if num_inserted:
            stop = other_place + num_inserted
            yield _EventDifference(place, slice(other_place, stop))
            other_place = stop
        elif _first_kind(rest) == _first_kind(other_rest):
            yield _EventDifference(place, slice(0, 0), other_place)
            place += 1
            other_place += 1
        else:
            raise NotPeriodicError


def _period(events: Sequence[Event], place: int, most: int) -> int:
    """The smallest number of events before this place that equal as many behind it; 0 if none do."""
    longest = min(most, place)
    for length in range(1, longest + 1):
        before = events[place - length : place]
        behind = events[place : place + length]
        if _num_equal(before, behind) == length:
            return length
    return 0


def _first_kind(events: Sequence[Event]) -> tuple[object, ...] | None:
    """What the first event is, besides sizes; None without events."""
    if not events:
        return None
    event = events[0]
    if isinstance(event, KernelLaunch):
        return event.kind, event.dtype, len(event.sizes)
    op = event.op
    return type(event), op.op, op.axis, op.group


def _num_inserted(events: Sequence[Event], others: Sequence[Event], most: int) -> int:
    """How many of `others` must be skipped for the longest start that equals that of `events`."""
    if not events:
        return most
    longest = 0
    best = 0
    for skipped in range(1, most + 1):
        count = _num_equal(events, others[skipped:])
        if count > longest:
            longest = count
            best = skipped
    return best


def _num_equal(events: Sequence[Event], others: Sequence[Event]) -> int:
    """Number of equal events at the begin of both."""
    count = 0
    for event, other in zip(events, others, strict=False):
        if type(event) is not type(other) or event != other:
            break
        count += 1
    return count


@dataclass(frozen=True)
class _AddedSizes:
    """The sizes that `count` blocks more add to an event, where one makes `longer` of `short`."""

    short: Event
    longer: Event
    count: int

    def added_to(self, event: Event) -> Event:
        """The event with these sizes more.

        Raises:
            NotPeriodicError: it is a collective. A bucket of gradients that one block more makes
                larger or smaller is full after a few blocks: sizes cannot be extrapolated.
        """
        short, longer, count = self.short, self.longer, self.count
        if not isinstance(event, KernelLaunch):
            raise NotPeriodicError
        assert isinstance(short, KernelLaunch)
        assert isinstance(longer, KernelLaunch)
        sizes = []
        for now, before, after in zip(event.sizes, short.sizes, longer.sizes, strict=True):
            size = now + count * (after - before)
            sizes.append(size)
        return replace(
            event,
            flops=event.flops + count * (longer.flops - short.flops),
            num_bytes=event.num_bytes + count * (longer.num_bytes - short.num_bytes),
            sizes=tuple(sizes),
        )
