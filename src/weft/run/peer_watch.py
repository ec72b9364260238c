"""Detection of hung peers by the ranks themselves, where no launcher sees all of them (torchrun, Slurm).

rank 0   waits in all_reduce, no progress ---- asks rank 1 ---> waits in the same call: joined
                                          +--- asks rank 2 ---> waits in a recv from rank 3
                                               asks rank 3 ---> no answer: rank 3 is the culprit
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from weft.core.mesh import Mesh
from weft.run.hang import MIN_TIMEOUT_S, phase_limit_s, step_limit_s
from weft.run.lock_holder import LockHolder
from weft.run.process_state import STOPPED, process_state
from weft.run.rank_status import Phase, RankSnapshot, StatusBoard, WaitingCall

# Note [Who is hung]
# Every rank has a thread that sees whether its own rank makes progress, and answers questions about it through the store of
# the world. A rank without progress in a call asks the members of that call, and follows those that have not joined it:
#
#     no answer                    stopped (SIGSTOP), or its machine or link is gone: the culprit
#     does not wait, no progress   computes or sleeps without end: the culprit, after the limit of its phase (weft.run.hang)
#     waits for another call       followed; a rank met twice closes a deadlock, and is the culprit
#     makes progress               nothing is wrong, it is slow
#     all members have joined      the data does not arrive: after the limit a link is cut, although the store is reached
#
# Phases outside of steps have limits of minutes (saving may take long). A member on the same machine whose process is stopped
# needs no such patience: its state says so.
#
# A rank whose store does not answer, and which makes no progress for as long, is cut off from the machine of the store. A
# second thread ends it, without a question to the others. The agent starts all ranks again in both cases.
#
# Questions cost requests only while a rank waits unusually long. The first verdict in the store counts, for all ranks: each
# exits, one prints, and the culprit is killed by a rank of its machine, so that the agent need not wait for it.
# A thread that does not run does not count time: a machine that was suspended or overloaded is no evidence.

ANSWER_S = 1.0
"""How long an answer may take; the question is asked this long before the limit."""
POLL_S = 0.1
RANKS_PER_POLL = 2000
"""In larger worlds ranks look at the store less often: so many ranks in POLL_S."""
MAX_SILENCE_S = 120.0
"""How long a rank waits in a call at most until it asks the members, outside of steps and while step
times are unknown."""


STORE_RANK = 0
"""The store is on the machine of this rank, or of the agent that has started it."""


class WatchStore(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class TimedStore:
    """A store that knows whether its oldest request has been answered."""

    def __init__(self, store: WatchStore) -> None:
        self._store = store
        self.is_silent = False
        """Whether the newest request has no answer yet, or the connection is lost."""

    def set(self, key: str, value: str) -> None:
        """As the method of the store."""
        self.is_silent = True
        self._store.set(key, value)
        self.is_silent = False

    def get(self, key: str) -> bytes:
        """As the method of the store."""
        self.is_silent = True
        value = self._store.get(key)
        self.is_silent = False
        return value

    def check(self, keys: list[str]) -> bool:
        """As the method of the store."""
        self.is_silent = True
        has_keys = self._store.check(keys)
        self.is_silent = False
        return has_keys

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As the method of the store."""
        self.is_silent = True
        value = self._store.compare_set(key, expected, desired)
        self.is_silent = False
        return value


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself.

    Attributes:
        place: `step 120, backward of layer5`.
        stalled_s: how long it has made no progress.
        waiting: the call that it waits for; None if it computes.
        num_started: group -> calls of the group that it has started.
    """

    question: str
    place: str
    phase: Phase
    stalled_s: float
    waiting: WaitingCall | None
    num_started: dict[int, int]

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Answer:
        """The answer in the text of `to_text`."""
        stored: dict[str, Any] = json.loads(text)
        call = stored["waiting"]
        if call is not None:
            call["members"] = tuple(call["members"])
            stored["waiting"] = WaitingCall(**call)
        num_started: dict[int, int] = {}
        for group, number in stored["num_started"].items():
            num_started[int(group)] = number
        stored["num_started"] = num_started
        return Answer(**stored)


@dataclass(frozen=True)
class PeerFailure:
    """The hung rank, and the error text, which begins with it."""

    rank: int
    text: str


class PeerWatch:
    """The thread of one rank; see Note [Who is hung].

    Args:
        board: a board of one slot, this rank's.
        timeout_s: time without progress after which a rank is hung, except in the start; 0:
            automatic, see `weft.run.hang.phase_limit_s`.
        on_verdict: called in the thread with the verdict and whether this rank reports it; it ends
            the process.
    """

    def __init__(
        self,
        store: WatchStore,
        rank: int,
        mesh: Mesh,
        board: StatusBoard,
        *,
        timeout_s: float,
        on_verdict: Callable[[PeerFailure, bool], None],
    ) -> None:
        self._store = TimedStore(store)
        self._rank = rank
        self._mesh = mesh
        self._board = board
        self._timeout_s = timeout_s
        self._max_silence_s = max(MAX_SILENCE_S, timeout_s)
        self._on_verdict = on_verdict
        self._interval_s = POLL_S * max(1.0, mesh.size / RANKS_PER_POLL)
        self._stalled_s = 0.0
        self._num_questions = 0
        self._last_question = ""
        self._store_host = ""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        for target in (self._watch, self._watch_store):
            thread = threading.Thread(target=target, name="weft peer watch", daemon=True)
            self._threads.append(thread)

    def __enter__(self) -> PeerWatch:
        process = LockHolder.this_process()
        self._store.set(f"process/{self._rank}", json.dumps(asdict(process)))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    def _watch(self) -> None:
        progress = -1
        checked_at_s = time.monotonic()
        asks_at_s = 0.0
        looks_at_s = 0.0
        while not self._closing.wait(self._interval_s):
            now_s = time.monotonic()
            interval_s = min(now_s - checked_at_s, 2 * self._interval_s)
            checked_at_s = now_s
            if self._board.progress(0) != progress:
                progress = self._board.progress(0)
                self._stalled_s = 0.0
                asks_at_s = 0.0
                looks_at_s = 0.0
            else:
                self._stalled_s += interval_s
            with suppress(RuntimeError):  # the store is lost: see `_watch_store`
                if not self._store_host:
                    self._store_host = self._host_of(STORE_RANK)
                self._answer()
                self._obey_verdict()
                snapshot = self._board.read(0)
                limit_s = min(self._limit_s(snapshot, snapshot.phase), self._max_silence_s)
                is_due = self._stalled_s >= max(limit_s - ANSWER_S, asks_at_s)
                if snapshot.waiting is None:
                    continue
                if is_due:
                    self._diagnose(snapshot.waiting, snapshot)
                    asks_at_s = self._stalled_s + ANSWER_S
                elif self._stalled_s >= max(self._timeout_s, MIN_TIMEOUT_S, looks_at_s):
                    self._find_stopped(snapshot.waiting)
                    looks_at_s = self._stalled_s + ANSWER_S

    def _watch_store(self) -> None:
        """End this rank if it makes no progress and the store does not answer for as long."""
        progress = -1
        silent_s = 0.0
        checked_at_s = time.monotonic()
        while not self._closing.wait(self._interval_s):
            now_s = time.monotonic()
            interval_s = min(now_s - checked_at_s, 2 * self._interval_s)
            checked_at_s = now_s
            is_new = self._board.progress(0) != progress
            progress = self._board.progress(0)
            if is_new or not self._store.is_silent:
                silent_s = 0.0
                continue
            silent_s += interval_s
            snapshot = self._board.read(0)
            limit_s = min(self._limit_s(snapshot, snapshot.phase), self._max_silence_s)
            if silent_s >= limit_s and snapshot.waiting is not None:
                self._on_verdict(self._unreachable(snapshot, silent_s), True)
                return

    def _unreachable(self, snapshot: RankSnapshot, silent_s: float) -> PeerFailure:
        """The verdict on the rank whose machine has the store."""
        place = f"rank {STORE_RANK} ({self._mesh.coord_text(STORE_RANK)})"
        if self._store_host:
            place += f" on {self._store_host}"
        finder = f"rank {self._rank} ({self._mesh.coord_text(self._rank)})"
        own_host = os.uname().nodename
        text = (
            f"{place}: its machine has not answered {finder} on {own_host} for {silent_s:.1f} s: "
            f"the link is cut, or one of them is down; found by rank {self._rank} at "
            f"{snapshot.place}"
        )
        return PeerFailure(STORE_RANK, text)

    def _limit_s(self, snapshot: RankSnapshot, phase: Phase) -> float:
        """How long a rank that computes may make no progress in a phase; `snapshot` has step times."""
        return phase_limit_s(phase, step_s=step_limit_s([snapshot]), timeout_s=self._timeout_s)

    def _answer(self) -> None:
        """Answer the newest question, if it is not answered yet."""
        key = f"ask/{self._rank}"
        if not self._store.check([key]):
            return
        question = self._store.get(key).decode()
        if question != self._last_question:
            self._last_question = question
            self._store.set(f"answer/{self._rank}", self._own_answer(question).to_text())

    def _own_answer(self, question: str) -> Answer:
        snapshot = self._board.read(0)
        return Answer(
            question,
            snapshot.place,
            snapshot.phase,
            self._stalled_s,
            snapshot.waiting,
            snapshot.num_started,
        )

    def _ask(self, rank: int) -> Answer | None:
        """The answer of a rank; None if it gives none. Answers to others' newer questions count."""
        if rank == self._rank:
            return self._own_answer("")
        self._num_questions += 1
        question = f"{self._rank} {self._num_questions}"
        earlier = self._answer_of(rank)
        self._store.set(f"ask/{rank}", question)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and not self._closing.wait(self._interval_s / 4):
            self._answer()
            answer = self._answer_of(rank)
            if answer is not None and answer != earlier:
                return answer
        return None

    def _answer_of(self, rank: int) -> Answer | None:
        key = f"answer/{rank}"
        if not self._store.check([key]):
            return None
        return Answer.from_text(self._store.get(key).decode())

    def _diagnose(self, call: WaitingCall, snapshot: RankSnapshot) -> None:
        """Follow the ranks that `call` waits for, and publish the verdict if one of them is hung."""
        path = [self._rank]
        while True:
            answers: dict[int, Answer] = {}
            member = self._first_missing(call, path, answers)
            if isinstance(member, PeerFailure):
                self._publish(member, call)
                return
            if member is None:
                self._check_arrival(call, snapshot, answers, asked_by=path[-1])
                return
            rank, answer = member
            if answer.waiting is None:
                if answer.stalled_s >= self._limit_s(snapshot, answer.phase):
                    text = f"{answer.place}: no progress for {answer.stalled_s:.1f} s"
                    self._publish(self._verdict(rank, text), call)
                return
            if rank in path:
                cycle = " -> ".join(f"rank {each}" for each in (*path[path.index(rank) :], rank))
                text = f"{answer.place}: deadlock, each waits for the next: {cycle}"
                self._publish(self._verdict(rank, text), call)
                return
            path.append(rank)
            call = answer.waiting

    def _find_stopped(self, call: WaitingCall) -> None:
        """Publish a verdict on a member of `call` on this machine whose process is stopped."""
        for member in call.members:
            if member == self._rank:
                continue
            process = self._process_of(member)
            if process is None or not process.is_on_this_machine() or not process.is_running():
                continue
            if process_state(process.pid).state == STOPPED:
                text = f"stopped for {self._stalled_s:.1f} s"
                self._publish(self._verdict(member, text), call)
                return

    def _check_arrival(
        self,
        call: WaitingCall,
        snapshot: RankSnapshot,
        answers: dict[int, Answer],
        *,
        asked_by: int,
    ) -> None:
        """Publish a verdict on a call that all members have joined, if one of them is hung elsewhere
        or if no data has arrived for longer than the limit.

        Args:
            answers: of the members other than `asked_by`.
        """
        if self._closing.is_set() or not answers:
            return
        limit_s = self._limit_s(snapshot, snapshot.phase)
        seconds = self._stalled_s
        for rank, answer in answers.items():
            if answer.waiting is None:
                if answer.stalled_s >= self._limit_s(snapshot, answer.phase):
                    text = f"{answer.place}: no progress for {answer.stalled_s:.1f} s"
                    self._publish(self._verdict(rank, text), call)
                return
            seconds = min(seconds, answer.stalled_s)
        if seconds < limit_s:
            return
        hosts = {rank: self._host_of(rank) for rank in (asked_by, *answers)}
        others = [rank for rank in answers if hosts[rank] != hosts[asked_by]]
        culprit = (others or list(answers))[0]
        ends = f"{hosts[culprit]} and {hosts[asked_by]}"
        text = (
            f"{answers[culprit].place}: all members have joined, but no data has arrived for "
            f"{seconds:.1f} s: the link between {ends} is cut, or data is lost"
        )
        self._publish(self._verdict(culprit, text), call, relation="stalled")

    def _first_missing(
        self, call: WaitingCall, path: list[int], answers: dict[int, Answer]
    ) -> PeerFailure | tuple[int, Answer] | None:
        """The first member that has not joined `call`, with its answer, or the verdict on one that
        does not answer; None if all have joined.

        Args:
            answers: gets those of members that have joined.
        """
        for member in call.members:
            if member == path[-1]:
                continue
            answer = self._ask(member)
            if self._closing.is_set():
                return None
            if answer is None:
                text = f"no answer for {ANSWER_S:g} s: stopped, or its machine is unreachable"
                return self._verdict(member, text)
            if answer.num_started.get(call.group, 0) <= call.position:
                return member, answer
            answers[member] = answer
        return None

    def _verdict(self, rank: int, text: str) -> PeerFailure:
        """The verdict on a rank, with its host if that is not the one of this rank."""
        host = self._host_of(rank)
        is_elsewhere = host not in ("", os.uname().nodename)
        place = f"rank {rank} ({self._mesh.coord_text(rank)})"
        if is_elsewhere:
            place += f" on {host}"
        return PeerFailure(rank, f"{place}: {text}")

    def _host_of(self, rank: int) -> str:
        """Name of the machine of a rank; "" while it is not known."""
        process = self._process_of(rank)
        return process.host if process is not None else ""

    def _process_of(self, rank: int) -> LockHolder | None:
        key = f"process/{rank}"
        if not self._store.check([key]):
            return None
        return LockHolder.from_text(self._store.get(key).decode())

    def _publish(
        self, verdict: PeerFailure, call: WaitingCall, *, relation: str = "missing"
    ) -> None:
        if self._stalled_s == 0.0 or self._board.read(0).waiting is None:
            return  # it went on meanwhile
        members = " ".join(map(str, call.members))
        text = (
            f"{verdict.text}; {relation} in {call.text}, ranks {members}; "
            f"found by rank {self._rank} at {self._board.read(0).place}"
        )
        own = json.dumps({"rank": verdict.rank, "text": text, "by": self._rank})
        self._store.compare_set("verdict", "", own)
        self._obey_verdict()

    def _obey_verdict(self) -> None:
        """Once there is a verdict: kill the culprit if it is on this machine, and end this rank."""
        if not self._store.check(["verdict"]):
            return
        stored = json.loads(self._store.get("verdict").decode())
        verdict = PeerFailure(stored["rank"], stored["text"])
        if verdict.rank != self._rank:
            self._kill(verdict.rank)
        self._on_verdict(verdict, stored["by"] == self._rank)

    def _kill(self, rank: int) -> None:
        process = self._process_of(rank)
        if process is None or not process.is_on_this_machine() or not process.is_running():
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
