"""Timeline of a predicted step: actions, phases, collectives on the lane of their communicator, messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.core.dimension import pipeline_axis
from weft.planner.simulate.link_replay import OpSpan
from weft.planner.simulate.pipeline_time import PlayedActions
from weft.planner.simulate.region_time import RegionTime
from weft.schedule.timeline import Span, Timeline


@dataclass(frozen=True)
class PhaseSpan:
    """What a pipeline rank does before or after its actions, in seconds after the begin of the
    step.

    Attributes:
        time: with its operations; None where they are not known.
    """

    rank: int
    name: str
    start: float
    end: float
    time: RegionTime | None


def step_timeline(
    played: PlayedActions, phases: Sequence[PhaseSpan], *, with_operations: bool = False
) -> Timeline:
    """The timeline of a step.

    Args:
        with_operations: with the collectives and messages, on lanes of their own.
    """
    num_ranks = played.order.table.num_ranks
    spans = list(_action_spans(played))
    spans.extend(
        Span(phase.rank, phase.name, phase.name, phase.start, phase.end) for phase in phases
    )
    if with_operations:
        spans.extend(_message_spans(played))
        for rank in range(num_ranks):
            spans.extend(_operation_spans(rank, played, phases))
    spans.sort(key=lambda span: (span.start, span.rank))
    return Timeline(tuple(spans), num_ranks=num_ranks, origin="predicted", unit="s")


def _action_spans(played: PlayedActions) -> Iterable[Span]:
    order = played.order
    for place, act in enumerate(order.acts):
        rank = order.classes[order.class_of[place]].rank
        yield Span(rank, str(act), act.kind, played.starts[place], played.ends[place])


def _message_spans(played: PlayedActions) -> Iterable[Span]:
    order = played.order
    for place, act in enumerate(order.acts):
        action_class = order.classes[order.class_of[place]]
        if action_class.peer is None:
            continue
        yield Span(
            rank=action_class.rank,
            name=f"{act} to rank {action_class.peer}",
            kind="send",
            start=played.message_starts[place],
            end=played.arrivals[place],
            lane=f"{pipeline_axis()} to {action_class.peer}",
        )


@dataclass
class _LaneSpans:
    """Spans of operations of a rank; an operation that goes on in another region is one span."""

    rank: int
    spans: list[Span] = field(default_factory=list)
    unfinished: dict[str, float] = field(default_factory=dict)

    def add(self, op_span: OpSpan, begin: float) -> None:
        """Add an operation of a region that begins at this time."""
        op = op_span.op
        start = begin + op_span.start
        if op_span.is_continued:
            start = self.unfinished.pop(op.lane, start)
        if op_span.continues:
            self.unfinished[op.lane] = start
            return
        end = begin + op_span.end
        self.spans.append(Span(self.rank, f"{op.name} {op.axis}", op.name, start, end, op.lane))


def _operation_spans(
    rank: int, played: PlayedActions, phases: Sequence[PhaseSpan]
) -> Iterable[Span]:
    lanes = _LaneSpans(rank)
    order = played.order
    for place, number in enumerate(order.class_of):
        if order.classes[number].rank == rank:
            for op_span in played.times[place].spans:
                lanes.add(op_span, played.starts[place])
    for phase in phases:
        if phase.rank == rank and phase.time is not None:
            for op_span in phase.time.spans:
                lanes.add(op_span, phase.start)
    return lanes.spans
