"""Owns the order of calls in one group of processes: opened when first used, compared where asked, late ones named."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from weft.comm.board import Board
from weft.comm.flights import Flight
from weft.comm.transport import Call
from weft.comm.wire import Line
from weft.errors import CommError, CommTimeout

PATIENCE_S = 0.25
"""A rank that has waited this long for a collective says so on the board: others can then tell who is missing."""

LATE_GRACE_S, LOST_GRACE_S = 0.1, 0.5
"""How long a rank whose time is up, or whose connection broke, looks for notes: after a break all leave theirs at once."""

LAST_WAIT_S = 5.0
"""How long closing waits for a worker that has been told to go."""

# Note [Order in a channel]
# Members of a group match calls by the order in which they start them. Three things would make `start` wait for other
# ranks: connecting the group at its first use, comparing what is brought, and launching before the comparison is done
# (gloo aborts the process when sizes differ). Waiting there deadlocks programs that are right: rank 0 starts an
# all_reduce and then sends, rank 1 receives and then starts the all_reduce. So these calls go to a worker thread, one for
# each channel, that plays them one after the other; a call goes straight to the backend when the group is connected,
# nothing is to be compared and the worker has nothing left to do.


class Channel:
    """One group's line. `open_line` connects it and may block until all members have come."""

    def __init__(self, name: str, open_line: Callable[[], Line], *, board: Board, timeout_s: float) -> None:
        self.name, self.board, self.timeout_s = name, board, timeout_s
        self._open_line = open_line
        self._line: Line | None = None
        self._failure: CommError | None = None
        self._lock = threading.Lock()
        self._num_started = 0
        self._num_queued = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self.flying: set[Trip] = set()

    def start(self, call: Call) -> Trip | Job:
        """Begin `call`: see Note [Order in a channel]."""
        with self._lock:
            turn, self._num_started = self._num_started, self._num_started + 1
            if self._line is None or call.checked or self._num_queued:
                return self._enqueue(Job(call, turn, _stream_of(call)))
            return self._launch(self._line, call, turn)

    def break_off(self, index: int) -> None:
        """Give up what this member, `index` of the group, has started and not waited for; let the worker go."""
        if self._line is not None and (self.flying or self._num_queued):
            self._line.abort(index)
        self._jobs.put(None)

    def join(self) -> None:
        """Return when the worker has gone: a daemon thread that drops a backend while Python shuts down aborts it."""
        if self._worker is not None:
            self._worker.join(LAST_WAIT_S)

    def explain(self, call: Call, turn: int, error: RuntimeError | None) -> CommError:
        """What to raise for a call that ran out of time (`error` None) or that the backend gave up."""
        if self._failure is not None:
            return CommError(f"{call.where}: its connections were closed after an earlier failure: {self._failure}")
        timed_out = error is None or "imed out" in str(error)
        others = [rank for rank in call.ranks if rank != call.rank]
        missing = (
            others if call.is_p2p else self._missing(call, turn, within_s=LATE_GRACE_S if timed_out else LOST_GRACE_S)
        )
        who = f"rank{'s' * (len(missing) > 1)} {' '.join(map(str, missing))}"
        if timed_out:
            what = f"{who} did not come" if missing else "all came, but it was not done"
            self._failure = CommTimeout(f"{call.where}: {what} within {self.timeout_s:g} s")
        else:
            what = f"lost {who}" if missing else "lost a connection"
            self._failure = CommError(f"{call.where}: {what} ({str(error).splitlines()[0]})")
        return self._failure

    def note_of(self, turn: int, rank: int) -> str:
        """What `rank` posts when it waits at this turn."""
        return f"{self.name}/{turn}/{rank}"

    def _missing(self, call: Call, turn: int, *, within_s: float) -> list[int]:
        self.board.post(self.note_of(turn, call.rank))
        posted = self.board.posted([self.note_of(turn, rank) for rank in call.ranks], within_s=within_s)
        return [rank for rank, is_there in zip(call.ranks, posted, strict=True) if not is_there]

    def _enqueue(self, job: Job) -> Job:
        self._num_queued += 1
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name=f"weft {self.name}", daemon=True)
            self._worker.start()
        self._jobs.put(job)
        return job

    def _launch(self, line: Line, call: Call, turn: int) -> Trip:
        trip = Trip(self, line.launch(call), call, turn)
        self.flying.add(trip)
        return trip

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            try:
                self._play(job)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the job
                job.error = error
            with self._lock:
                self._num_queued -= 1
            done = job.done
            del job  # else its tensors would live until the next one comes
            done.set()

    def _opened(self, call: Call) -> Line:
        try:
            return self._open_line()
        except RuntimeError as error:
            raise CommError(f"{call.where}: the group cannot be connected: {error}") from error

    def _play(self, job: Job) -> None:
        call = job.call
        if self._line is None:
            self._line = self._opened(call)
        if call.checked:
            Trip(self, self._line.compare(call), call, job.turn).wait()
        with torch.cuda.stream(job.stream) if job.stream else nullcontext():
            self._launch(self._line, call, job.turn).wait()


@dataclass(eq=False)
class Job:
    """A call in the hands of the worker."""

    call: Call
    turn: int
    stream: torch.cuda.Stream | None
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        """Block until the worker has played it; the worker keeps to the time-out."""
        self.done.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether the worker has played it."""
        return self.done.is_set()


@dataclass(eq=False)
class Trip:
    """A call in the hands of the backend."""

    channel: Channel
    flight: Flight
    call: Call
    turn: int

    def wait(self) -> None:
        """Block until it is done; after a while leave word that this rank is here."""
        try:
            done = self._arrive()
        except RuntimeError as error:
            raise self.channel.explain(self.call, self.turn, error) from error
        finally:
            self.channel.flying.discard(self)
        if not done:
            raise self.channel.explain(self.call, self.turn, None)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.flight.is_completed()

    def _arrive(self) -> bool:
        limit_s = self.channel.timeout_s
        if self.call.is_p2p:
            return self.flight.wait(limit_s)
        if self.flight.wait(min(PATIENCE_S, limit_s)):
            return True
        self.channel.board.post(self.channel.note_of(self.turn, self.call.rank))
        deadline = time.monotonic() + limit_s - PATIENCE_S
        while not self.flight.wait(PATIENCE_S):  # in slices, so that Ctrl-C gets through
            if time.monotonic() > deadline:
                return False
        return True


def _stream_of(call: Call) -> torch.cuda.Stream | None:
    """The stream on which the caller's work with its tensors is ordered, which the worker has to keep to."""
    tensor = call.take if call.take is not None else call.give
    return torch.cuda.current_stream(tensor.device) if tensor is not None and tensor.is_cuda else None
