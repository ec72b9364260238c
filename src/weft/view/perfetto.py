"""Timeline as trace events in JSON, for ui.perfetto.dev and chrome://tracing: a process a rank, a thread a lane.

Format: "Trace Event Format" (Google, 2016), as the Perfetto documentation imports it. Times are
microseconds. Phases used: M (names), X (a span), s and f (the arrow of a message).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.schedule.actions import Act
from weft.schedule.timeline import COMPUTE, Span, Timeline, lanes_of

TraceEvent = dict[str, Any]
Threads = Mapping[tuple[int, str], int]
"""(rank, lane) -> number of its thread."""
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
    threads = _threads(timeline)
    events = [
        *_names(timeline, threads),
        *(_span_event(span, threads) for span in timeline.spans),
        *_arrows(timeline, threads),
    ]
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "origin": timeline.origin, "unit": timeline.unit},
    }
    return json.dumps(trace) + "\n"


def _threads(timeline: Timeline) -> Threads:
    """The thread number of each lane of each rank."""
    threads: dict[tuple[int, str], int] = {}
    for rank in range(timeline.num_ranks):
        lanes = lanes_of(timeline, rank)
        for number, lane in enumerate(lanes):
            threads[rank, lane] = number
    return threads


def _names(timeline: Timeline, threads: Threads) -> Iterator[TraceEvent]:
    for rank in range(timeline.num_ranks):
        process = _Lane(process=rank, thread=0)
        yield _metadata("process_name", process, name=f"rank {rank}")
        yield _metadata("process_sort_index", process, sort_index=rank)
    for (rank, lane), number in threads.items():
        thread = _Lane(process=rank, thread=number)
        yield _metadata("thread_name", thread, name=lane)
        yield _metadata("thread_sort_index", thread, sort_index=number)


def _metadata(name: str, lane: _Lane, /, **args: object) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": lane.process, "tid": lane.thread, "args": args}


def _span_event(span: Span, threads: Threads) -> TraceEvent:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": threads[span.rank, span.lane],
        "ts": float(span.start) * MICROSECONDS,
        "dur": float(span.duration) * MICROSECONDS,
    }


def _arrows(timeline: Timeline, threads: Threads) -> Iterator[TraceEvent]:
    """From each message to the action that uses it."""
    actions: dict[str, Span] = {}
    messages: list[Span] = []
    for span in timeline.spans:
        if span.kind in COMPUTE:
            actions[span.name] = span
        if MESSAGE_TO in span.name:
            messages.append(span)
    for number, message in enumerate(messages):
        user = _user_of(message, actions)
        if user is None:
            continue
        arrow = {"cat": "message", "name": "message", "id": number}
        yield {
            **arrow,
            "ph": "s",
            "pid": message.rank,
            "tid": threads[message.rank, message.lane],
            "ts": float(message.start) * MICROSECONDS,
        }
        yield {
            **arrow,
            "ph": "f",
            "bp": "e",
            "pid": user.rank,
            "tid": threads[user.rank, user.lane],
            "ts": float(user.start) * MICROSECONDS,
        }


def _user_of(message: Span, actions: Mapping[str, Span]) -> Span | None:
    """The action that uses the tensor of a message."""
    producer, _, _ = message.name.partition(MESSAGE_TO)
    for act in _users(Act.parse(producer)):
        user = actions.get(str(act))
        if user is not None:
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
