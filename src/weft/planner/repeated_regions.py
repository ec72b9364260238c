"""A recorded region with more blocks: copies of a block's segment, and events that belong to no block, grown by differences."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from weft.comm.observe import Operation
from weft.planner.kernels import KernelLaunch
from weft.planner.recorder import BlockSegment, Ended, Event, RecordedRegion, Started


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


@dataclass(frozen=True)
class LongerRegion:
    """A region of a rank with one block more of a kind, and how many such blocks are to be added."""

    region: RecordedRegion
    count: int


def grown_region(short: RecordedRegion, longer: Sequence[LongerRegion]) -> RecordedRegion:
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


def _grown_events(events: Sequence[Event], longer: Sequence[LongerRegion]) -> list[Event]:
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
            sizes = []
            for now, before, after in zip(event.sizes, short.sizes, longer.sizes, strict=True):
                sizes.append(now + count * (after - before))
            return replace(
                event,
                flops=event.flops + count * (longer.flops - short.flops),
                num_bytes=event.num_bytes + count * (longer.num_bytes - short.num_bytes),
                sizes=tuple(sizes),
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
