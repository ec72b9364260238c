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
    simulation = _Simulation(calls)
    simulation.run()
    return simulation.cycle()


@dataclass(frozen=True)
class _MessageKind:
    """Sends, or receives, from one rank to another.

    Attributes:
        pair: source and destination.
    """

    pair: tuple[int, ...]
    op: str


class _Simulation:
    """Progress of the ranks.

    Attributes:
        position: by rank, place of its next call.
        started, waited: messages so far.
        begun: ids of operations that were started.
    """

    def __init__(self, calls: Mapping[int, Sequence[Started | Ended]]) -> None:
        self.calls = calls
        self.position = dict.fromkeys(calls, 0)
        self.started: Counter[_MessageKind] = Counter()
        self.waited: Counter[_MessageKind] = Counter()
        self.begun: set[int] = set()

    def run(self) -> None:
        """Go on until every rank has ended or is blocked."""
        has_moved = True
        while has_moved:
            has_moved = False
            for rank in self.calls:
                if self._advance(rank):
                    has_moved = True

    def cycle(self) -> tuple[Blocked, ...]:
        """Ranks that wait for each other, from any blocked one on; a chain that ends at a rank
        without further calls is a cycle of one.
        """
        blocked = self._blocked()
        if not blocked:
            return ()
        chain: list[int] = []
        rank = next(iter(blocked))
        while rank in blocked and rank not in chain:
            chain.append(rank)
            rank = blocked[rank].waits_for[0]
        start = chain.index(rank) if rank in chain else len(chain) - 1
        return tuple(blocked[each] for each in chain[start:])

    def _blocked(self) -> dict[int, Blocked]:
        """The ranks that have not ended."""
        blocked = {}
        for rank in self.calls:
            event = self._current(rank)
            if event is None:
                continue
            missing = self._missing(event)
            blocked[rank] = Blocked(rank, event.op, missing)
        return blocked

    def _current(self, rank: int) -> Started | Ended | None:
        events = self.calls[rank]
        index = self.position[rank]
        return events[index] if index < len(events) else None

    def _advance(self, rank: int) -> bool:
        """Run a rank until it blocks; whether it moved."""
        has_moved = False
        while True:
            event = self._current(rank)
            if event is None or self._missing(event):
                return has_moved
            self._pass(rank, event)
            has_moved = True

    def _pass(
        self,
        rank: int,
        event: Started | Ended,
    ) -> None:
        """Let a rank, or all members that meet in a collective, go on behind an event."""
        op = event.op
        is_start = isinstance(event, Started)
        members = [rank]
        if is_start and not op.is_p2p:
            members = self._present(op)
        for member in members:
            self.position[member] += 1
        if is_start:
            self.begun.add(id(op))
        if op.is_p2p:
            counter = self.started if is_start else self.waited
            message = _MessageKind(op.group, op.op)
            counter[message] += 1

    def _missing(self, event: Started | Ended) -> tuple[int, ...]:
        """Members that must get somewhere before a rank can go on behind its event."""
        op = event.op
        if isinstance(event, Started):
            return () if op.is_p2p else self._absent(op)
        is_of_earlier_region = id(op) not in self.begun
        if not op.is_p2p or is_of_earlier_region:  # such a wait ends at once
            return ()
        return self._missing_partner(op)

    def _missing_partner(self, op: Operation) -> tuple[int, ...]:
        """The other rank of a message that is waited for, if it has not started its side."""
        source, destination = op.group
        if op.op == "send":
            partner, partner_op = destination, "recv"
        else:
            partner, partner_op = source, "send"
        num_started = self.started[_MessageKind(op.group, partner_op)]
        num_waited = self.waited[_MessageKind(op.group, op.op)]
        if num_started > num_waited or partner not in self.calls:
            return ()
        return (partner,)

    def _present(self, op: Operation) -> list[int]:
        return [member for member in op.group if member in self.calls]

    def _absent(self, op: Operation) -> tuple[int, ...]:
        """Members that are not at a collective over this group."""
        absent = []
        for member in self._present(op):
            event = self._current(member)
            if not _is_collective_of(event, op.group):
                absent.append(member)
        return tuple(absent)


def _is_collective_of(
    event: Started | Ended | None,
    group: tuple[int, ...],
) -> bool:
    """Whether a rank is at a collective over this group."""
    if not isinstance(event, Started):
        return False
    return event.op.group == group and not event.op.is_p2p
