"""Simulation of ranks that meet in collectives, and the cycle of ranks that wait for each other if it stops.

Note [The strictest backend]
    A collective blocks where it is started until every member is at it; a message blocks where it
    is waited for until the other side has started it. Real backends block later or not at all. So
    ranks that get to their end here get there on every backend, also on one that runs the
    collectives of a device one after another in the order in which they were started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.comm.observe import Operation
from weft.planner.measure.recorder import Ended, Started
from weft.schedule.engine import RankRows


@dataclass(frozen=True)
class Blocked:
    """A rank that cannot go on.

    Attributes:
        op: that it is in.
        waits_for: members that are not.
    """

    rank: int
    op: Operation
    waits_for: tuple[int, ...]


def find_deadlock(calls: Mapping[int, Sequence[Started | Ended]]) -> tuple[Blocked, ...]:
    """Run the calls of these ranks; the ranks of a cycle of waits, or () if all get to their end.

    Members of a group that are not among the ranks are taken to be in time.
    """
    meetings = _Meetings(calls)
    waiting = meetings.ranks.advance(meetings.attempt)
    return _cycle(
        {each.rank: Blocked(each.rank, each.step.op, tuple(each.lacks)) for each in waiting}
    )


def _cycle(blocked: Mapping[int, Blocked]) -> tuple[Blocked, ...]:
    """Ranks that wait for each other, from any blocked one on; a chain that ends at a rank without
    further calls is a cycle of one.
    """
    if not blocked:
        return ()
    chain: list[int] = []
    rank = next(iter(blocked))
    while rank in blocked and rank not in chain:
        chain.append(rank)
        rank = blocked[rank].waits_for[0]
    start = chain.index(rank) if rank in chain else len(chain) - 1
    return tuple(blocked[each] for each in chain[start:])


@dataclass(frozen=True)
class _MessageKind:
    """Sends, or receives, from one rank to another.

    Attributes:
        pair: source and destination.
    """

    pair: tuple[int, ...]
    op: str


class _Meetings:
    """Who has come to which call.

    Attributes:
        ranks: progress of each rank along its calls.
        started, waited: messages so far.
        begun: ids of operations that were started.
    """

    def __init__(self, calls: Mapping[int, Sequence[Started | Ended]]) -> None:
        self.ranks = RankRows(calls)
        self.started: Counter[_MessageKind] = Counter()
        self.waited: Counter[_MessageKind] = Counter()
        self.begun: set[int] = set()

    def attempt(self, rank: int, event: Started | Ended) -> Sequence[int]:
        """A collective waits for its members and takes them along; the wait for a message waits
        for the start of its other side.
        """
        op = event.op
        if isinstance(event, Ended):
            # The wait for a collective, or for a message of an earlier region, ends at once.
            missing = self._missing_partner(op) if op.is_p2p and id(op) in self.begun else ()
            if op.is_p2p and not missing:
                self.waited[_MessageKind(op.group, op.op)] += 1
            return missing
        if op.is_p2p:
            self.started[_MessageKind(op.group, op.op)] += 1
            self.ranks.wake(rank)
        elif absent := self._absent(op):
            return absent
        else:
            for member in self._present(op):
                if member != rank:
                    self.ranks.take_along(member)
        self.begun.add(id(op))
        return ()

    def _missing_partner(self, op: Operation) -> Sequence[int]:
        """The other rank of a message that is waited for, if it has not started its side."""
        source, destination = op.group
        partner, partner_op = (destination, "recv") if op.op == "send" else (source, "send")
        num_started = self.started[_MessageKind(op.group, partner_op)]
        num_waited = self.waited[_MessageKind(op.group, op.op)]
        has_started = num_started > num_waited or partner not in self.ranks.rows
        return () if has_started else (partner,)

    def _present(self, op: Operation) -> list[int]:
        return [member for member in op.group if member in self.ranks.rows]

    def _absent(self, op: Operation) -> list[int]:
        """Members that are not at a collective over this group."""
        heads = {member: self.ranks.head(member) for member in self._present(op)}
        return [member for member, head in heads.items() if not _is_collective_of(head, op.group)]


def _is_collective_of(event: Started | Ended | None, group: tuple[int, ...]) -> bool:
    """Whether a rank is at a collective over this group."""
    return isinstance(event, Started) and event.op.group == group and not event.op.is_p2p
