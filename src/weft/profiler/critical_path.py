"""Critical path of a measured step: from its end back through what each rank had to wait for.

Note [Critical path]
    From the end of the last rank the path goes back in time along what that rank did. Where a call
    blocked it that another rank had started later, the path goes over the communication to the
    moment when that rank started the call, and goes on there: had it come earlier, the step would
    have ended earlier.

        rank 0  ==========>.                       .== update
        rank 1  ------------\\ message ============/ all_reduce

    The pieces of the path cover the step without gaps, so their lengths add up to it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.profiler.matched_calls import BlockedTime
from weft.profiler.measured_steps import MeasuredSteps


class PathPiece(NamedTuple):
    """A piece of the path: a rank that computes, or a call.

    Attributes:
        call: the operation and its axis; "" where the rank computes.
    """

    rank: int
    start: float
    end: float
    call: str = ""

    @property
    def duration(self) -> float:
        """Seconds from its start to its end."""
        return self.end - self.start


@dataclass(frozen=True)
class CriticalPath:
    """The critical path of a step, from its begin to its end."""

    step: int
    pieces: tuple[PathPiece, ...]

    @property
    def length(self) -> float:
        """Seconds from the start of the first piece to the end of the last."""
        return self.pieces[-1].end - self.pieces[0].start

    @property
    def by_rank(self) -> dict[int, float]:
        """Seconds in which each rank computes on the path, the most first."""
        seconds: defaultdict[int, float] = defaultdict(float)
        for piece in self.pieces:
            if not piece.call:
                seconds[piece.rank] += piece.duration
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def critical_path(steps: MeasuredSteps, step: int) -> CriticalPath:
    """The critical path of a step that every rank has whole; see Note [Critical path]."""
    accounts = [steps.account(rank, step) for rank in range(len(steps.ranks))]
    last = max(accounts, key=lambda each: each.end)
    rank, now = last.rank, last.end
    pieces: list[PathPiece] = []
    for _ in range(1 + 2 * sum(map(len, steps.calls.blocked))):
        begin = accounts[rank].start
        blocked = _last_before(steps.calls.blocked[rank], now)
        if blocked is None or blocked.end <= begin:
            if now > begin:
                pieces.append(PathPiece(rank, begin, now))
            break
        end = min(blocked.end, now)
        if now > end:
            pieces.append(PathPiece(rank, end, now))
        is_late = blocked.joined.rank != rank and blocked.joined.at > blocked.start
        source = min(blocked.joined.at, end) if is_late else blocked.start
        source = max(source, begin)
        if end > source:
            pieces.append(PathPiece(rank, source, end, f"{blocked.call.op} {blocked.call.axis}"))
        rank = blocked.joined.rank if is_late else rank
        now = source
    return CriticalPath(step, tuple(reversed(pieces)))


def _last_before(blocked: Sequence[BlockedTime], now: float) -> BlockedTime | None:
    """The last time that began before a moment."""
    place = bisect.bisect_left(blocked, now, key=lambda each: each.start)
    return blocked[place - 1] if place else None


def work_on_path(steps: MeasuredSteps, path: CriticalPath) -> dict[str, float]:
    """Seconds of the path by what was done, the most first: `B1` (the backward of stage 1), a phase,
    or a call.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for piece in path.pieces:
        if piece.call:
            seconds[piece.call] += piece.duration
            continue
        left = piece.duration
        for each in steps.actions[piece.rank]:
            inside = min(each.end, piece.end) - max(each.start, piece.start)
            if inside > 0:
                seconds[f"{each.act.kind}{each.act.stage}"] += inside
                left -= inside
        for phase in steps.phases[piece.rank]:
            inside = min(phase.end, piece.end) - max(phase.start, piece.start)
            if inside > 0 and phase.name != "forward":
                seconds[phase.name] += inside
                left -= inside
        if left > 0:
            seconds["between actions"] += left
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))
