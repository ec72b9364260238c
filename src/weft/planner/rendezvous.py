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
from weft.planner.recorder import Ended, Started

Pair = tuple[int, ...]
"""Source and destination of messages."""


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


class _Simulation:
    """Progress of each rank."""

    def __init__(self, calls: Mapping[int, Sequence[Started | Ended]]) -> None:
        self.calls = calls
        self.position = dict.fromkeys(calls, 0)
        self.started: Counter[tuple[Pair, str]] = Counter()
        self.waited: Counter[tuple[Pair, str]] = Counter()
        self.begun: set[int] = set()

    def run(self) -> None:
        """Go on until every rank has ended or is blocked."""
        while True:
            moved = [rank for rank in self.calls if self._advance(rank)]
            if not moved:
                return

    def cycle(self) -> tuple[Blocked, ...]:
        """Ranks that wait for each other, from any blocked one on; a chain that ends at a rank
        without further calls is a cycle of one.
        """
        blocked: dict[int, Blocked] = {}
        for rank in self.calls:
            event = self._current(rank)
            if event is not None:
                missing = self._missing(rank, event)
                blocked[rank] = Blocked(rank, event.op, missing)
        if not blocked:
            return ()
        chain: list[int] = []
        rank = next(iter(blocked))
        while rank in blocked and rank not in chain:
            chain.append(rank)
            rank = blocked[rank].waits_for[0]
        start = chain.index(rank) if rank in chain else len(chain) - 1
        return tuple(blocked[each] for each in chain[start:])

    def _current(self, rank: int) -> Started | Ended | None:
        events = self.calls[rank]
        index = self.position[rank]
        return events[index] if index < len(events) else None

    def _advance(self, rank: int) -> bool:
        """Run a rank until it blocks; whether it moved."""
        before = self.position[rank]
        while True:
            event = self._current(rank)
            if event is None or self._missing(rank, event):
                return self.position[rank] != before
            self._pass(rank, event)

    def _pass(self, rank: int, event: Started | Ended) -> None:
        """Let a rank, or all members that meet in a collective, go on behind an event."""
        op = event.op
        is_start = isinstance(event, Started)
        is_meeting = is_start and not op.is_p2p
        members = self._present(op) if is_meeting else [rank]
        for member in members:
            self.position[member] += 1
        if is_start:
            self.begun.add(id(op))
        if op.is_p2p:
            counter = self.started if is_start else self.waited
            counter[op.group, op.op] += 1

    def _missing(self, rank: int, event: Started | Ended) -> tuple[int, ...]:
        """Members that must get somewhere before this rank can go on."""
        op = event.op
        if isinstance(event, Started):
            return () if op.is_p2p else self._absent(op)
        is_of_earlier_region = id(op) not in self.begun
        if not op.is_p2p or is_of_earlier_region:  # such a wait ends at once
            return ()
        source, destination = op.group
        is_send = op.op == "send"
        other = destination if is_send else source
        other_side = "recv" if is_send else "send"
        num_started = self.started[op.group, other_side]
        num_waited = self.waited[op.group, op.op]
        if num_started > num_waited or other not in self.calls:
            return ()
        return (other,)

    def _present(self, op: Operation) -> list[int]:
        return [member for member in op.group if member in self.calls]

    def _absent(self, op: Operation) -> tuple[int, ...]:
        """Members that are not at a collective over this group."""
        absent = []
        for member in self._present(op):
            event = self._current(member)
            is_there = isinstance(event, Started) and event.op.group == op.group
            if not is_there or event is None or event.op.is_p2p:
                absent.append(member)
        return tuple(absent)
