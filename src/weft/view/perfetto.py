"""Timeline as trace events in JSON, for ui.perfetto.dev and chrome://tracing: a process a rank, a thread a lane.

Format: "Trace Event Format" (Google, 2016), as the Perfetto documentation imports it. Times are
microseconds. Phases used: M (names), X (a span), s and f (the arrow of a message).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weft.schedule.actions import Act, Kind
from weft.schedule.timeline import COMPUTE, Span, Timeline, lanes_of

TraceEvent = dict[str, Any]
MICROSECONDS = 1e6
MESSAGE_TO = " to rank "
"""Between the action that produces a message and the rank that receives it, in a span's name."""


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


def _threads(timeline: Timeline) -> dict[tuple[int, str], int]:
    """The thread number of each lane of each rank."""
    threads: dict[tuple[int, str], int] = {}
    for rank in range(timeline.num_ranks):
        for number, lane in enumerate(lanes_of(timeline, rank)):
            threads[rank, lane] = number
    return threads


def _names(timeline: Timeline, threads: Mapping[tuple[int, str], int]) -> Iterator[TraceEvent]:
    for rank in range(timeline.num_ranks):
        yield _metadata("process_name", rank, 0, {"name": f"rank {rank}"})
        yield _metadata("process_sort_index", rank, 0, {"sort_index": rank})
    for (rank, lane), number in threads.items():
        yield _metadata("thread_name", rank, number, {"name": lane})
        yield _metadata("thread_sort_index", rank, number, {"sort_index": number})


def _metadata(name: str, rank: int, thread: int, args: Mapping[str, object]) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": dict(args)}


def _span_event(span: Span, threads: Mapping[tuple[int, str], int]) -> TraceEvent:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": span.rank,
        "tid": threads[span.rank, span.lane],
        "ts": float(span.start) * MICROSECONDS,
        "dur": float(span.duration) * MICROSECONDS,
    }


def _arrows(timeline: Timeline, threads: Mapping[tuple[int, str], int]) -> Iterator[TraceEvent]:
    """From each message to the action that uses it."""
    actions = {span.name: span for span in timeline.spans if span.kind in COMPUTE}
    messages = (span for span in timeline.spans if MESSAGE_TO in span.name)
    for number, message in enumerate(messages):
        produced = Act.parse(message.name.partition(MESSAGE_TO)[0])
        user = next((actions[name] for name in _users(produced) if name in actions), None)
        if user is None:
            continue
        arrow = {"cat": "message", "name": "message", "id": number}
        start = {"ph": "s", "pid": message.rank, "tid": threads[message.rank, message.lane]}
        end = {"ph": "f", "bp": "e", "pid": user.rank, "tid": threads[user.rank, user.lane]}
        yield {**arrow, **start, "ts": float(message.start) * MICROSECONDS}
        yield {**arrow, **end, "ts": float(user.start) * MICROSECONDS}


def _users(produced: Act) -> Iterable[str]:
    """Names of the actions that may use the tensor of an action."""
    if produced.kind == "F":
        return (str(Act("F", produced.stage + 1, produced.mb)),)
    backwards: tuple[Kind, ...] = ("B", "I")
    return [str(Act(kind, produced.stage - 1, produced.mb)) for kind in backwards]
