"""Detection of hung peers by the ranks themselves, where no launcher sees all of them (torchrun, Slurm).

A thread of every rank answers questions, and asks when its rank waits too long (`weft.run.peer_diagnosis`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from weft.core.mesh import Mesh
from weft.run import peer_diagnosis
from weft.run.hang import MIN_TIMEOUT_S, busy_limit_s, phase_limit_s, step_limit_s
from weft.run.lock_holder import LockHolder
from weft.run.peer_diagnosis import HungPeer, PeerDiagnosis
from weft.run.peer_messages import Answer, PeerMessages, StoredVerdict, WatchStore
from weft.run.process_state import STOPPED, process_state
from weft.run.rank_status import RankSnapshot, StatusBoard, WaitingCall

# Note [Who is hung]
# Every rank has a thread that sees whether its own rank makes progress, and answers questions about it through the store of
# the world. A rank without progress in a call asks the members of that call, and follows those that have not joined it:
#
#     no answer                    stopped (SIGSTOP), or its machine or link is gone: the culprit
#     does not wait, no progress   computes or sleeps: the culprit after the limit of a pause (weft.run.hang), a minute in steps
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

POLL_S = 0.1
RANKS_PER_POLL = 2000
"""In larger worlds ranks look at the store less often: so many ranks in POLL_S."""
ASK_SHARE = 0.1
"""Between two questions about a rank that pauses, of the time that it has paused."""
MAX_SILENCE_S = 120.0
"""How long a rank waits in a call at most until it asks the members, outside of steps and while step
times are unknown."""


STORE_RANK = 0
"""The store is on the machine of this rank, or of the agent that has started it."""


@dataclass(frozen=True)
class PeerFailure:
    """The hung rank, and the error text, which begins with it."""

    rank: int
    text: str


class _RunClock:
    """Seconds between the rounds of a thread, of which long ones count as two: then it did not run."""

    def __init__(self, interval_s: float) -> None:
        self._most_s = 2 * interval_s
        self._read_at_s = time.monotonic()

    def elapsed_s(self) -> float:
        """Since the last call."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._read_at_s
        self._read_at_s = now_s
        return min(elapsed_s, self._most_s)


class PeerWatch:
    """The thread of one rank; see Note [Who is hung].

    Args:
        board: a board of one slot, this rank's.
        timeout_s: time without progress after which a rank is hung, except in the start; 0:
            automatic, see `weft.run.hang.phase_limit_s`.
        patience: see `weft.run.hang.busy_limit_s`.
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
        patience: int = 1,
        on_verdict: Callable[[PeerFailure, bool], None],
    ) -> None:
        self._messages = PeerMessages(store, rank)
        self._rank = rank
        self._mesh = mesh
        self._board = board
        self._timeout_s = timeout_s
        self._patience = patience
        self._max_silence_s = max(MAX_SILENCE_S, timeout_s)
        self._on_verdict = on_verdict
        self._interval_s = POLL_S * max(1.0, mesh.size / RANKS_PER_POLL)
        self._progress = -1
        self._stalled_s = 0.0
        self._asks_at_s = 0.0
        self._looks_at_s = 0.0
        self._store_host = ""
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        for target in (self._watch, self._watch_store):
            thread = threading.Thread(target=target, name="weft peer watch", daemon=True)
            self._threads.append(thread)

    def __enter__(self) -> PeerWatch:
        # before the threads: others may look for it as soon as this rank joins a call
        self._messages.post_process(LockHolder.this_process())
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()

    # ------------------------------------------------------------------ the thread that asks and answers

    def _watch(self) -> None:
        clock = _RunClock(self._interval_s)
        while not self._closing.wait(self._interval_s):
            self._measure_stall(clock.elapsed_s())
            with suppress(RuntimeError):  # the store is lost: see `_watch_store`
                if not self._store_host:
                    self._store_host = self._messages.host_of(STORE_RANK)
                self._answer()
                self._obey_verdict()
                self._look_for_hung_peers()

    def _measure_stall(self, elapsed_s: float) -> None:
        """Count the time since this rank made progress."""
        progress = self._board.progress(0)
        if progress == self._progress:
            self._stalled_s += elapsed_s
            return
        self._progress = progress
        self._stalled_s = 0.0
        self._asks_at_s = 0.0
        self._looks_at_s = 0.0

    def _look_for_hung_peers(self) -> None:
        """Ask the ranks that this one waits for, or look at their processes, if it is time to."""
        snapshot = self._board.read(0)
        call = snapshot.waiting
        if call is None:
            return
        answer_s = peer_diagnosis.ANSWER_S
        first_question_s = self._limit_s(snapshot) - answer_s
        if self._stalled_s >= max(first_question_s, self._asks_at_s):
            self._diagnose(call, snapshot)
            self._asks_at_s = self._stalled_s + max(answer_s, ASK_SHARE * self._stalled_s)
        elif self._stalled_s >= max(self._timeout_s, MIN_TIMEOUT_S, self._looks_at_s):
            self._find_stopped(call)
            self._looks_at_s = self._stalled_s + answer_s

    def _limit_s(self, snapshot: RankSnapshot) -> float:
        """How long this rank waits in its phase before it asks, or gives the store up."""
        step_s = step_limit_s([snapshot])
        limit_s = phase_limit_s(snapshot.phase, step_s=step_s, timeout_s=self._timeout_s)
        return min(limit_s, self._max_silence_s)

    def _diagnose(self, call: WaitingCall, snapshot: RankSnapshot) -> None:
        """Publish a verdict if a rank that `call` waits for is hung."""
        step_s = step_limit_s([snapshot])
        diagnosis = PeerDiagnosis(
            rank=self._rank,
            phase=snapshot.phase,
            stalled_s=self._stalled_s,
            ask=self._ask,
            host_of=self._messages.host_of,
            limit_s=lambda phase: phase_limit_s(phase, step_s=step_s, timeout_s=self._timeout_s),
            busy_limit_s=lambda phase: busy_limit_s(
                phase, step_s=step_s, timeout_s=self._timeout_s, patience=self._patience
            ),
            is_closing=self._closing.is_set,
        )
        finding = diagnosis.find(call)
        if finding is not None:
            self._publish(finding)

    def _find_stopped(self, call: WaitingCall) -> None:
        """Publish a verdict on a member of `call` on this machine whose process is stopped."""
        for member in call.members:
            if member == self._rank:
                continue
            process = self._messages.process_of(member)
            if process is None or not process.is_on_this_machine() or not process.is_running():
                continue
            if process_state(process.pid).state == STOPPED:
                text = f"stopped for {self._stalled_s:.1f} s"
                self._publish(HungPeer(member, text, call))
                return

    def _answer(self) -> None:
        """Answer the newest question, if it is not answered yet."""
        question = self._messages.new_question()
        if question is not None:
            self._messages.answer(self._own_answer(question))

    def _own_answer(self, question: str) -> Answer:
        snapshot = self._board.read(0)
        return Answer.of_rank(question, snapshot, stalled_s=self._stalled_s)

    def _ask(self, rank: int) -> Answer | None:
        """The answer of a rank; None if it gives none. Answers to others' newer questions count."""
        if rank == self._rank:
            return self._own_answer("")
        earlier = self._messages.answer_of(rank)
        self._messages.ask(rank)
        deadline_s = time.monotonic() + peer_diagnosis.ANSWER_S
        while time.monotonic() < deadline_s and not self._closing.wait(self._interval_s / 4):
            # while it waits itself: of two ranks that ask each other neither would answer in time
            self._answer()
            answer = self._messages.answer_of(rank)
            if answer is not None and answer != earlier:
                return answer
        return None

    # ------------------------------------------------------------------ the verdict

    def _publish(self, finding: HungPeer) -> None:
        """Store the verdict on a rank, unless this rank went on meanwhile."""
        own = self._board.read(0)
        # the answers have taken up to a second for each member
        if self._stalled_s == 0.0 or own.waiting is None:
            return
        call = finding.call
        members = " ".join(map(str, call.members))
        text = (
            f"{self._place_of(finding.rank)}: {finding.text}; {finding.relation} in {call.text}, "
            f"ranks {members}; found by rank {self._rank} at {own.place}"
        )
        self._messages.publish(StoredVerdict(finding.rank, text, by=self._rank))
        self._obey_verdict()

    def _place_of(self, rank: int) -> str:
        """A rank with its coordinates, and its host if that is not the one of this rank."""
        place = self._name_of(rank)
        host = self._messages.host_of(rank)
        if host in ("", os.uname().nodename):
            return place
        return f"{place} on {host}"

    def _name_of(self, rank: int) -> str:
        return f"rank {rank} ({self._mesh.coord_text(rank)})"

    def _obey_verdict(self) -> None:
        """Once there is a verdict: kill the culprit if it is on this machine, and end this rank."""
        stored = self._messages.verdict()
        if stored is None:
            return
        if stored.rank != self._rank:
            self._kill(stored.rank)
        verdict = PeerFailure(stored.rank, stored.text)
        self._on_verdict(verdict, stored.by == self._rank)

    def _kill(self, rank: int) -> None:
        process = self._messages.process_of(rank)
        if process is None or not process.is_on_this_machine() or not process.is_running():
            return
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)

    # ------------------------------------------------------------------ the thread that watches the store

    def _watch_store(self) -> None:
        """End this rank if it makes no progress and the store does not answer for as long."""
        progress = -1
        silent_s = 0.0
        clock = _RunClock(self._interval_s)
        while not self._closing.wait(self._interval_s):
            elapsed_s = clock.elapsed_s()
            has_progress = self._board.progress(0) != progress
            progress = self._board.progress(0)
            # a request that returns late shows the store to be there
            if has_progress or not self._messages.is_silent:
                silent_s = 0.0
                continue
            silent_s += elapsed_s
            snapshot = self._board.read(0)
            if silent_s >= self._limit_s(snapshot) and snapshot.waiting is not None:
                self._on_verdict(self._unreachable(snapshot, silent_s), True)
                return

    def _unreachable(self, snapshot: RankSnapshot, silent_s: float) -> PeerFailure:
        """The verdict on the rank whose machine has the store."""
        place = self._name_of(STORE_RANK)
        if self._store_host:
            place += f" on {self._store_host}"
        own_host = os.uname().nodename
        text = (
            f"{place}: its machine has not answered {self._name_of(self._rank)} on {own_host} for "
            f"{silent_s:.1f} s: the link is cut, or one of them is down; found by rank "
            f"{self._rank} at {snapshot.place}"
        )
        return PeerFailure(STORE_RANK, text)
