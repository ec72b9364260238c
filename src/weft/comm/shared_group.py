"""The calls of a group in shared memory, in order, and who moves them on: those that wait, and a thread for the others.

Note [Progress in shared memory]
    A call is a generator that goes on until it must wait for another member. No thread of a backend
    moves it on in the meantime; a thread that waits in this process moves on all calls of all groups. So
    a rank that waits in one group does its part in the others, and correct programs do not
    deadlock. A thread does it for calls that no thread waits for, because the rank computes or waits
    for something else. It looks more and more rarely as long as it finds nothing to do: with more
    ranks than cores it would take time from those that compute.

Note [Waiting in shared memory]
    A rank that waits yields its core some times, for ranks that arrive together, and then sleeps at
    the counters of the members that it waits for. With two ranks on two cores the first is enough;
    of eight ranks on two cores, those that sleep leave the cores to those that compute.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from weft.comm.backend_work import BackendCall
from weft.comm.device_groups import SHARED_MEMORY
from weft.comm.local_peers import LocalPeers
from weft.comm.shared_algorithms import steps_of
from weft.comm.shared_memory import Rounds, SeenWord, SharedSegment, wait_for_change
from weft.comm.transport import Call
from weft.errors import MismatchError

SLEEP_S = 0.05
"""Longest sleep of a rank that waits; then it looks whether another has left."""
FIRST_LOOK_S, LAST_LOOK_S = 0.001, 0.032
IDLE_S = 1.0
"""How long the thread goes on looking when nothing is under way."""


class SharedCall(BackendCall):
    """A call in shared memory."""

    def __init__(self, group: SharedGroup, call: Call) -> None:
        super().__init__(())
        self.group = group
        self._steps = steps_of(group.rounds, call)
        self.is_done = False
        self.error: Exception | None = None

    def advance(self) -> bool:
        """Go on until another member must be waited for; whether the call is done."""
        rounds = self.group.rounds
        try:
            while rounds.is_complete():
                rounds.publish(next(self._steps))
        except StopIteration:
            self.is_done = True
        except MismatchError as error:
            self.error = error
            self.is_done = True
        return self.is_done

    def wait(self, timeout_s: float) -> bool:
        """Block for at most `timeout_s`; whether the call is complete.

        Raises:
            MismatchError: the signatures differ.
            RuntimeError: a member has left, or the group was closed.
        """
        if not self.is_done:
            self.group.progress.wait_for(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.is_done

    def is_completed(self) -> bool:
        """Whether it is complete, after what can be done without waiting."""
        if not self.is_done:
            self.group.progress.advance()
        return self.is_done


class SharedGroup:
    """The calls of one member of a group.

    Attributes:
        policy: how its calls are carried.
        rounds: of this member.
        ranks: world ranks of the members.
    """

    policy = SHARED_MEMORY

    def __init__(
        self,
        segment: SharedSegment,
        ranks: tuple[int, ...],
        *,
        index: int,
        progress: SharedProgress,
    ) -> None:
        self.rounds = Rounds(segment, index, len(ranks))
        self.ranks = ranks
        self.progress = progress
        self._calls: deque[SharedCall] = deque()
        self._failure: RuntimeError | None = None

    def launch(self, call: Call) -> BackendCall:
        """Start a call: do what can be done without waiting."""
        started = SharedCall(self, call)
        self.progress.start(self, started)
        return started

    def add(self, call: SharedCall) -> bool:
        """Add a call behind those that are under way; whether it still is."""
        if self._failure is not None:
            call.error, call.is_done = self._failure, True
            return False
        self._calls.append(call)
        return len(self._calls) > 1 or self.advance()

    def advance(self) -> bool:
        """Move on the calls, in order; whether any is left."""
        try:
            while self._calls and self._calls[0].advance():
                self._calls.popleft()
        except RuntimeError as error:
            self.fail(error)
        except BaseException:
            self.fail(RuntimeError("the call was interrupted"))
            raise
        return bool(self._calls)

    def fail(self, error: RuntimeError) -> None:
        """Fail what is under way, and later calls."""
        self._failure = self._failure or error
        while self._calls:
            call = self._calls.popleft()
            call.error, call.is_done = self._failure, True

    def abort(self) -> None:
        """Fail what is under way."""
        with self.progress.lock:
            self.fail(RuntimeError("closed by this rank"))


class SharedProgress:
    """All groups of a rank in shared memory: see Note [Progress in shared memory].

    Args:
        peers: the other ranks of this host.
    """

    def __init__(self, peers: LocalPeers) -> None:
        self.lock = threading.RLock()
        self._peers = peers
        self._busy: set[SharedGroup] = set()
        self._is_busy = threading.Event()
        self._is_closed = False
        self._looked_at_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self, group: SharedGroup, call: SharedCall) -> None:
        """Start a call of a group."""
        with self.lock:
            if group.add(call):
                self._busy.add(group)
                if not self._is_busy.is_set():
                    self._wake_thread()

    def advance(self) -> bool:
        """Move on all calls; whether any of them got on."""
        got_on = False
        with self.lock:
            for group in tuple(self._busy):
                before = group.rounds.number
                if not group.advance():
                    self._busy.discard(group)
                    got_on = True
                got_on = got_on or group.rounds.number > before
        return got_on

    def wait_for(self, call: SharedCall, timeout_s: float) -> None:
        """Move on all calls until this one is done, for at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        rounds = call.group.rounds
        while True:
            if not rounds.spin():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return
                self._sleep(call, min(left_s, SLEEP_S))
            self.advance()
            if call.is_done:
                return

    def close(self) -> None:
        """End the thread, and let the other ranks see that this one leaves."""
        self._is_closed = True
        self._is_busy.set()  # after the flag, which the thread reads when it wakes
        self._peers.close()

    def _sleep(self, call: SharedCall, timeout_s: float) -> None:
        """Sleep until a member publishes, then look from time to time who has left."""
        words = self._awaited_words(call)
        if words:
            wait_for_change(words, timeout_s)
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= SLEEP_S:
            self._looked_at_s = now_s
            self._fail_lost()

    def _awaited_words(self, call: SharedCall) -> list[SeenWord]:
        """The counters that calls wait for; [] if one of them can go on, or this one is done."""
        words: list[SeenWord] = []
        with self.lock:
            for group in self._busy:
                word = group.rounds.awaited_word()
                if word is None:
                    return []
                words.append(word)
            return [] if call.is_done else words

    def _fail_lost(self) -> None:
        """Fail groups that wait for a rank that has left."""
        lost = self._peers.lost()
        if not lost:
            return
        self.advance()  # what they have published before counts
        with self.lock:
            for group in tuple(self._busy):
                word = group.rounds.awaited_word()
                rank = group.ranks[group.rounds.awaited] if word else -1
                if rank in lost:
                    group.fail(RuntimeError(f"connection closed by rank {rank}"))

    def _wake_thread(self) -> None:
        self._is_busy.set()
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(
                target=self._run_thread, name="weft shared memory", daemon=True
            )
            self._thread.start()

    def _run_thread(self) -> None:
        """Move on calls that no thread waits for."""
        interval_s, idle_since_s = FIRST_LOOK_S, time.monotonic()
        while not self._is_closed:
            time.sleep(interval_s)
            interval_s = FIRST_LOOK_S if self.advance() else min(2 * interval_s, LAST_LOOK_S)
            now_s = time.monotonic()
            if self._busy:
                idle_since_s = now_s
            elif now_s - idle_since_s > IDLE_S:
                # Under the lock, so that a call that starts now either is seen as busy or finds the event cleared.
                with self.lock:
                    if not self._busy and not self._is_closed:
                        self._is_busy.clear()
                self._is_busy.wait()
                interval_s, idle_since_s = FIRST_LOOK_S, time.monotonic()
