"""Timeline as trace events in JSON, for ui.perfetto.dev and chrome://tracing: a process a rank, a thread a lane.

Format: "Trace Event Format" (Google, 2016), as the Perfetto documentation imports it. Times are
microseconds. Phases used: M (names), X (a span), s and f (the arrow of a message).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from weft.schedule.actions import Act
from weft.schedule.timeline import COMPUTE, Span, Timeline, lanes_of
from weft.view.svg import TitledTimeline

TraceEvent = dict[str, Any]
MICROSECONDS = 1e6
MESSAGE_TO = " to rank "
"""Between the action that produces a message and the rank that receives it, in a span's name."""


@dataclass(frozen=True)
class _Lane:
    """A thread of the trace, and the process it is of."""

    process: int
    thread: int


def perfetto(timeline: Timeline, *, title: str) -> str:
    """The timeline as a JSON trace; one unit of a timeline without seconds becomes one second."""
    return stacked_perfetto([TitledTimeline(title, timeline)], title=title)


def stacked_perfetto(titled: Sequence[TitledTimeline], *, title: str) -> str:
    """Timelines of one time as a JSON trace: the processes of the first one, then of the next."""
    events: list[TraceEvent] = []
    first_start = min(
        (float(span.start) for each in titled for span in each.timeline.spans), default=0
    )
    process = 0
    for each in titled:
        part = _Part(each, first_process=process, zero=min(first_start, 0.0))
        events.extend(part.events())
        process += each.timeline.num_ranks
    timeline = titled[-1].timeline
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "origin": timeline.origin, "unit": timeline.unit},
    }
    return json.dumps(trace) + "\n"


@dataclass(frozen=True)
class _Part:
    """The events of one timeline.

    Attributes:
        first_process: number of the process of its rank 0.
        zero: the time at which the trace begins.
    """

    titled: TitledTimeline
    first_process: int
    zero: float

    def events(self) -> Iterator[TraceEvent]:
        yield from self._names()
        for span in self.titled.timeline.spans:
            yield self._span_event(span)
        yield from self._arrows()

    @cached_property
    def lanes(self) -> dict[tuple[int, str], _Lane]:
        """The thread of each lane of each rank."""
        timeline = self.titled.timeline
        return {
            (rank, lane): _Lane(self.first_process + rank, number)
            for rank in range(timeline.num_ranks)
            for number, lane in enumerate(lanes_of(timeline, rank))
        }

    def _names(self) -> Iterator[TraceEvent]:
        for rank in range(self.titled.timeline.num_ranks):
            process = _Lane(self.first_process + rank, thread=0)
            yield _metadata("process_name", process, name=self.titled.rank_name(rank))
            yield _metadata("process_sort_index", process, sort_index=process.process)
        for (_, name), lane in self.lanes.items():
            yield _metadata("thread_name", lane, name=name)
            yield _metadata("thread_sort_index", lane, sort_index=lane.thread)

    def _at(self, span: Span) -> TraceEvent:
        """The thread of a span, and its start."""
        lane = self.lanes[span.rank, span.lane]
        ts = (float(span.start) - self.zero) * MICROSECONDS
        return {"pid": lane.process, "tid": lane.thread, "ts": ts}

    def _span_event(self, span: Span) -> TraceEvent:
        duration = float(span.duration) * MICROSECONDS
        return {"ph": "X", "name": span.name, "cat": span.kind, **self._at(span), "dur": duration}

    def _arrows(self) -> Iterator[TraceEvent]:
        """From each message to the action that uses it."""
        actions: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
        messages: list[Span] = []
        for span in self.titled.timeline.spans:
            if span.kind in COMPUTE:
                actions[span.rank, span.name].append(span)
            if MESSAGE_TO in span.name and span.kind == "send":
                messages.append(span)
        for number, message in enumerate(messages):
            user = _user_of(message, actions)
            if user is None:
                continue
            place = f"{self.first_process}.{number}" if self.first_process else number
            arrow = {"cat": "message", "name": "message", "id": place}
            yield {**arrow, "ph": "s", **self._at(message)}
            yield {**arrow, "ph": "f", "bp": "e", **self._at(user)}


def _metadata(name: str, lane: _Lane, /, **args: object) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": lane.process, "tid": lane.thread, "args": args}


def _user_of(message: Span, actions: Mapping[tuple[int, str], Sequence[Span]]) -> Span | None:
    """The action that uses the tensor of a message: the first one after it began."""
    producer, _, receiver = message.name.partition(MESSAGE_TO)
    for act in _users(Act.parse(producer)):
        for user in actions.get((int(receiver), str(act)), ()):
            if user.end > message.start:
                return user
    return None


def _users(produced: Act) -> Iterator[Act]:
    """The actions that may use the tensor of an action."""
    if produced.kind == "F":
        yield Act("F", produced.stage + 1, produced.mb)
        return
    previous = produced.stage - 1
    yield Act("B", previous, produced.mb)
    yield Act("I", previous, produced.mb)
