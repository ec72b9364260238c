"""Calls of all ranks of a profile, matched: who started each last, and when a rank did nothing but wait or communicate.

Note [Waiting and communication]
    No member of a group can complete a call before the last one has started it. While a rank is
    blocked by a call it waits for that last rank until then; what is left of the time is the
    communication itself. On one clock the two can be told apart:

        rank 0  ----- computes -----| wait ..........................|
        rank 1  ------------- computes --------------| wait .........|
                                    |<-- waiting --->|<-- commun. -->|

    A call that goes on while its rank computes may block the rank only while it is being started:
    then it waits for no other rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.profiler.rank_records import CallRecord, RankRecords

CallKey = tuple[bool, tuple[int, ...], str, int]
"""Whether it is a message, its ranks, its communicator, and its place among such calls of a rank."""


class Joined(NamedTuple):
    """When the last member of a call started it, and which one."""

    at: float
    rank: int


class BlockedTime(NamedTuple):
    """A time in which a call blocked its rank.

    Attributes:
        joined: when all members had started the call.
    """

    rank: int
    call: CallRecord
    start: float
    end: float
    joined: Joined

    @property
    def waiting(self) -> float:
        """Seconds until all members had started the call."""
        return max(0.0, min(self.end, self.joined.at) - self.start)

    @property
    def communication(self) -> float:
        """Seconds from the time when all members had started the call."""
        return self.end - self.start - self.waiting


@dataclass(frozen=True)
class MatchedCalls:
    """The calls of all ranks.

    Attributes:
        blocked: by rank, in the order of their start; they do not overlap.
        under_way: by rank and place of a call: from when on all members had started it (of a
            collective: this rank), until it was known to be complete; of a message on either side.
    """

    blocked: tuple[tuple[BlockedTime, ...], ...]
    under_way: tuple[tuple[tuple[float, float], ...], ...]

    @staticmethod
    def of(ranks: Sequence[RankRecords]) -> MatchedCalls:
        """Match the calls of the ranks of a profile, which all began at the same place."""
        error_s = 2 * max(rank.header.offset_error_s for rank in ranks)
        joined: dict[CallKey, Joined] = {}
        keyed = [list(_with_keys(rank.calls)) for rank in ranks]
        for number, calls in enumerate(keyed):
            for key, call in calls:
                other = joined.get(key)
                if other is None or call.start > other.at:
                    joined[key] = Joined(call.start, number)
        received = {key: call.waited for calls in keyed for key, call in calls if call.op == "recv"}
        return MatchedCalls(
            blocked=tuple(
                tuple(_blocked(number, calls, joined, error_s=error_s))
                for number, calls in enumerate(keyed)
            ),
            under_way=tuple(
                tuple(_under_way(call, joined[key], received.get(key)) for key, call in calls)
                for calls in keyed
            ),
        )


def _under_way(call: CallRecord, joined: Joined, received: float | None) -> tuple[float, float]:
    """When a call was under way; a message that has been received has been sent, too."""
    if not call.is_p2p:
        return call.start, call.waited
    end = call.waited if received is None else min(call.waited, received)
    return min(max(call.start, joined.at), end), end


def _with_keys(calls: Sequence[CallRecord]) -> Iterator[tuple[CallKey, CallRecord]]:
    """Calls with what is the same on all members: those of a group are started in one order."""
    counts: defaultdict[tuple[bool, tuple[int, ...], str], int] = defaultdict(int)
    for call in calls:
        group = (call.is_p2p, call.ranks, call.communicator)
        yield (*group, counts[group]), call
        counts[group] += 1


def _blocked(
    rank: int,
    calls: Sequence[tuple[CallKey, CallRecord]],
    joined: dict[CallKey, Joined],
    *,
    error_s: float,
) -> Iterator[BlockedTime]:
    """The times in which calls blocked a rank.

    Args:
        error_s: by which clocks may differ.
    """
    found: list[BlockedTime] = []
    for key, call in calls:
        for start, end in ((call.start, call.started), (call.wait, call.waited)):
            if end > start:
                last = joined[key]
                if last.at > end + error_s:  # the rank went on before the last member had come
                    last = Joined(start, rank)
                found.append(BlockedTime(rank, call, start, end, last))
    found.sort(key=lambda each: each.start)
    reached = float("-inf")
    for each in found:
        if each.end > reached:
            yield each._replace(start=max(each.start, reached))
            reached = each.end
