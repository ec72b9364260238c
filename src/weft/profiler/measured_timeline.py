"""Timeline of measured steps: actions and phases of each rank, its blocks, its calls on a lane an axis, and its waits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from weft.core.dimension import pipeline_axis
from weft.profiler.critical_path import CriticalPath
from weft.profiler.measured_steps import MeasuredSteps
from weft.profiler.rank_records import CallRecord
from weft.schedule.actions import Table
from weft.schedule.lower import Send, Transfer, lower
from weft.schedule.timeline import KERNELS, Span, Timeline

BLOCKS = "blocks"
WAITS = "waits"
PATH = "critical path"
"""The lanes of blocks, of times in which a rank waits for another one, and of what is critical."""
PHASE_NAMES = {"forward": "targets", "end": "between steps"}
"""Of phases: what comes before the first action, and after a step; the others keep their names."""


def measured_timeline(
    steps: MeasuredSteps,
    numbers: tuple[int, ...],
    table: Table,
    *,
    paths: Sequence[CriticalPath] = (),
    nested: bool = False,
) -> Timeline:
    """The timeline of some steps; times begin with the first action phase of the first one.

    Args:
        paths: critical paths, which are drawn on a lane of their own.
        nested: with the steps, and with blocks inside their actions, on the lane of kernels; else
            without steps, and blocks have a lane of their own.
    """
    zero = min(
        phase.start
        for phases in steps.phases
        for phase in phases
        if phase.step == numbers[0] and phase.name == "forward"
    )
    names = _message_names(steps, table)
    spans: list[Span] = []
    for rank in range(len(steps.ranks)):
        first = steps.account(rank, numbers[0]).start
        last = steps.account(rank, numbers[-1]).end
        found = [
            *(_steps(steps, rank, numbers) if nested else ()),
            *_phases(steps, rank),
            *_actions(steps, rank),
            *_blocks(steps, rank, lane=KERNELS if nested else BLOCKS),
            *_calls(steps, rank, names),
            *_waits(steps, rank),
            *_path_pieces(paths, rank),
        ]
        spans.extend(
            span._replace(start=span.start - zero, end=span.end - zero)
            for span in found
            if span.end > first and span.start < last and span.end > span.start
        )
    spans.sort(key=lambda span: (span.start, -span.end))
    return Timeline(tuple(spans), num_ranks=len(steps.ranks), origin="measured", unit="s")


def _steps(steps: MeasuredSteps, rank: int, numbers: tuple[int, ...]) -> Iterator[Span]:
    for number in numbers:
        account = steps.account(rank, number)
        yield Span(rank, f"step {number}", "step", account.start, account.end)


def _phases(steps: MeasuredSteps, rank: int) -> Iterator[Span]:
    """Phases without the actions, which are spans themselves."""
    begins = sorted(action.start for action in steps.ranks[rank].actions)
    for phase in steps.phases[rank]:
        name = PHASE_NAMES.get(phase.name, phase.name)
        end = phase.end
        if phase.name == "forward":
            end = min((each for each in begins if phase.start <= each < phase.end), default=end)
        yield Span(rank, name, name, phase.start, end)


def _actions(steps: MeasuredSteps, rank: int) -> Iterator[Span]:
    for action in steps.actions[rank]:
        yield Span(rank, str(action.act), action.act.kind, action.start, action.end)


def _blocks(steps: MeasuredSteps, rank: int, *, lane: str) -> Iterator[Span]:
    """Blocks, each until the next one or the end of its action."""
    blocks = steps.ranks[rank].blocks
    place = 0
    for action in steps.actions[rank]:
        inside: list[tuple[str, float]] = []
        while place < len(blocks) and blocks[place].start < action.end:
            name, start = blocks[place]
            inside.append((name, max(start, action.start)))
            place += 1
        inside.append(("", action.end))
        for (name, start), (_, end) in pairwise(inside):
            kind = "forward" if action.act.kind == "F" else "backward"
            yield Span(
                rank, f"{name}, micro-batch {action.act.mb}", f"block {kind}", start, end, lane
            )


def _calls(steps: MeasuredSteps, rank: int, names: dict[tuple[int, int], str]) -> Iterator[Span]:
    """Calls, on a lane a group; one begins when it was under way and those before it have ended."""
    reached: dict[str, float] = {}
    for place, call in enumerate(steps.ranks[rank].calls):
        lane = _lane(call)
        begin, end = steps.calls.under_way[rank][place]
        start = max(begin, reached.get(lane, begin))
        reached[lane] = max(end, start)
        size = f"{call.op} {call.axis}, {call.num_bytes:,} bytes"
        name = names.get((rank, place), size)
        yield Span(rank, name, call.op, start, reached[lane], lane)


def _lane(call: CallRecord) -> str:
    """`dp`, `pp to 2`, `pp from 0`: one for each direction of messages."""
    if not call.is_p2p:
        return call.axis
    source, destination = call.ranks
    if call.op == "send":
        return f"{call.axis} to {destination}"
    return f"{call.axis} from {source}"


def _waits(steps: MeasuredSteps, rank: int) -> Iterator[Span]:
    for blocked in steps.calls.blocked[rank]:
        if blocked.waiting:
            name = f"waits for rank {blocked.joined.rank} ({blocked.call.op} {blocked.call.axis})"
            end = blocked.start + blocked.waiting
            yield Span(rank, name, "wait", blocked.start, end, WAITS)


def _path_pieces(paths: Sequence[CriticalPath], rank: int) -> Iterator[Span]:
    for path in paths:
        for piece in path.pieces:
            if piece.rank == rank:
                name = f"critical path: {piece.call or 'computes'}"
                yield Span(rank, name, PATH, piece.start, piece.end, PATH)


def _message_names(steps: MeasuredSteps, table: Table) -> dict[tuple[int, int], str]:
    """Names of messages between stages, by rank and place of the call: `F0.1 to rank 2`.

    A rank starts them in the order of its row of the lowered table, in every step.
    """
    axis = pipeline_axis()
    names: dict[tuple[int, int], str] = {}
    for rank, row in _lowered_rows(steps, table):
        orders: defaultdict[tuple[str, int], list[Transfer]] = defaultdict(list)
        for transfer in row:
            orders["send" if isinstance(transfer, Send) else "recv", transfer.peer].append(transfer)
        counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        for place, call in enumerate(steps.ranks[rank].calls):
            if not call.is_p2p or call.axis != axis:
                continue
            other = call.ranks[1] if call.op == "send" else call.ranks[0]
            key = (call.op, steps.mesh.index(other, axis))
            order = orders[key]
            if order:
                act = order[counts[key] % len(order)].act
                counts[key] += 1
                word = "to" if call.op == "send" else "from"
                names[rank, place] = f"{act} {word} rank {other}"
    return names


def _lowered_rows(steps: MeasuredSteps, table: Table) -> Iterator[tuple[int, list[Transfer]]]:
    rows = lower(table).rows
    for rank in range(len(steps.ranks)):
        row = rows[steps.mesh.index(rank, pipeline_axis())]
        yield rank, [each for each in row if isinstance(each, Transfer)]
