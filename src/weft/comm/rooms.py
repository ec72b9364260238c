"""Owns rendezvous between threads: a `Room` per group, a `Meeting` per operation, a verdict that releases all."""

from __future__ import annotations

import threading
import time

from weft.comm.exchange import exchange
from weft.comm.signature import Brought, check
from weft.comm.transport import Call
from weft.errors import CommError, CommTimeout

SLICE_S = 1.0
"""A wait longer than this looks up once in a while, to see whether anybody can still come."""


class Meeting:
    """One operation: the calls that came, and how it ended. The last to come plays it for all."""

    __slots__ = ("calls", "done", "error", "num_missing")

    def __init__(self, size: int) -> None:
        self.calls: list[Call | None] = [None] * size
        self.num_missing = size
        self.done = False
        self.error: CommError | None = None

    def play(self) -> None:
        """With everybody here: check that what they brought fits together, and do it."""
        calls = [call for call in self.calls if call is not None]
        try:
            check(
                calls[0].axis,
                calls[0].ranks,
                [Brought(call.brings, call.give_counts, call.take_counts) for call in calls],
            )
            exchange(calls)
        except CommError as error:
            self.error = error
        except (RuntimeError, TypeError, ValueError) as error:
            self.error = CommError(f"{calls[0].where}: {error}")

    def missing(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `ranks`, the group, who have not come; nobody once it is done."""
        return tuple(rank for rank, call in zip(ranks, self.calls, strict=False) if call is None)


class Room:
    """Where one group meets: its own lock and condition, so that groups do not wake each other."""

    __slots__ = ("condition", "meetings", "turns")

    def __init__(self, size: int) -> None:
        self.condition = threading.Condition(threading.Lock())
        self.meetings: dict[int, Meeting] = {}
        self.turns = [0] * size

    def enter(self, call: Call) -> Meeting:
        """Join the meeting whose turn it is for this member; the last one plays it."""
        with self.condition:
            turn = self.turns[call.index]
            self.turns[call.index] = turn + 1
            meeting = self.meetings.get(turn)
            if meeting is None:
                meeting = self.meetings[turn] = Meeting(len(self.turns))
            meeting.calls[call.index] = call
            meeting.num_missing -= 1
            if meeting.num_missing:
                return meeting
            del self.meetings[turn]
        meeting.play()
        with self.condition:
            meeting.calls = []
            meeting.done = True
            self.condition.notify_all()
        return meeting


class House:
    """All rooms of a world, who has left it, who is stuck, and the verdict once nobody can go on."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._rooms: dict[tuple[bool, tuple[int, ...]], Room] = {}
        self._lock = threading.Lock()
        self._verdict: tuple[type[CommError], str] | None = None
        self._left: set[int] = set()
        self._stuck: dict[int, tuple[Meeting, Call]] = {}

    def room(self, call: Call) -> Room:
        """The room of the group of `call`; messages have one for each ordered pair."""
        key = (call.is_p2p, call.ranks)
        return self._rooms.get(key) or self._rooms.setdefault(key, Room(len(call.ranks)))

    def condemn(self, kind: type[CommError], message: str) -> None:
        """Nothing will complete any more: all who wait, now or later, raise this. The first verdict stands."""
        with self._lock:
            self._verdict = self._verdict or (kind, message)
        self._wake_all()

    def leave(self, rank: int) -> None:
        """`rank` has finished; whoever waits for it raises."""
        self._left.add(rank)
        self._wake_all()

    def wait(self, meeting: Meeting, call: Call, *, is_only_thread: bool) -> None:
        """Block until `meeting` is done; `is_only_thread`: while it blocks, the rank does nothing else."""
        if not meeting.done:
            try:
                self._await(meeting, call, is_only_thread)
            finally:
                self._stuck.pop(call.rank, None)
        if meeting.error is not None:
            raise type(meeting.error)(*meeting.error.args)

    def _await(self, meeting: Meeting, call: Call, is_only_thread: bool) -> None:
        condition, deadline = self.room(call).condition, time.monotonic() + self.timeout_s
        with condition:
            while not meeting.done:
                self._raise_if_hopeless(meeting, call)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise CommTimeout(_timed_out(meeting, call, self.timeout_s))
                if not condition.wait(min(left_s, SLICE_S)) and is_only_thread:
                    self._stuck[call.rank] = (meeting, call)

    def _raise_if_hopeless(self, meeting: Meeting, call: Call) -> None:
        if self._verdict is not None:
            kind, message = self._verdict
            raise kind(f"{call.where}: {message}")
        gone = [rank for rank in meeting.missing(call.ranks) if rank in self._left]
        if gone:
            raise CommTimeout(f"{call.where}: {_ranks(gone)} finished without coming")
        if len(self._stuck) + len(self._left) >= self.size:
            self._raise_if_deadlocked(call)

    def _raise_if_deadlocked(self, call: Call) -> None:
        stuck = dict(self._stuck)
        if call.rank not in stuck or any(meeting.done for meeting, _ in stuck.values()):
            return
        waits = (
            f"rank {rank} at {their.where}, for {_ranks(meeting.missing(their.ranks))}"
            for rank, (meeting, their) in sorted(stuck.items())
        )
        with self._lock:
            self._verdict = self._verdict or (CommTimeout, "deadlock, every rank waits: " + "; ".join(waits))
        raise CommTimeout(self._verdict[1])

    def _wake_all(self) -> None:
        for room in list(self._rooms.values()):
            with room.condition:
                room.condition.notify_all()


def _timed_out(meeting: Meeting, call: Call, timeout_s: float) -> str:
    missing = meeting.missing(call.ranks)
    came = [rank for rank in call.ranks if rank not in missing]
    return f"{call.where}: {_ranks(missing)} did not come within {timeout_s:g} s; there: {_ranks(came)}"


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, ranks))}"
