"""Thread transport: one rank per thread of this process; deterministic, starts fast, and detects deadlocks.

Note [Turns]
    A rank of a small model computes in Python, and every torch operation releases the lock of the
    interpreter and takes it again. Where other threads are ready, each of these hands the lock to
    another core: 32 ranks on two idle cores spent more system time on that than they computed. In
    turns nothing else is ready, and the lock stays where it is.

    Nothing relies on turns. Who holds one may wait for something that is no collective (a thread of
    its own, a file), so a rank that has waited PATIENCE_S for a turn goes on without one; and a rank
    that polls has none until it joins its next collective.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import torch

from weft.comm.rendezvous import PendingCollective, ThreadWorldState
from weft.comm.transport import Call, OnLate, SharedResults, Transport
from weft.core.transports import thread_transports
from weft.errors import CommError, Fault, LaunchError, counted, did_you_mean

# Note [Backward in rank threads]
# A collective inside `backward` must block its own rank only. For tensors on the CPU the autograd engine runs a backward
# pass in the thread that called it. For tensors on an accelerator it has one thread for each device, shared by all ranks
# of the process: two ranks on one GPU would wait for each other inside that thread. So rank threads run under
# `torch.autograd.set_multithreading_enabled(False)`: every backward runs in the thread that called it, and any number of
# ranks may share a GPU.
# Gradient mode, inference mode, autocast and flush-denormal belong to a thread; the default random generator, default
# dtype and number of intra-op threads belong to the process, and all ranks share them.


PATIENCE_S = 20.0


class Turn:
    """One rank's turn, taken and released by the thread of that rank.

    Args:
        lock: of all ranks of a world; None: ranks compute at the same time.
    """

    __slots__ = ("_is_held", "_lock")

    def __init__(self, lock: threading.Lock | None) -> None:
        self._lock = lock
        self._is_held = False

    def take(self) -> None:
        """Wait for the turn, if this rank has none; at most PATIENCE_S."""
        if self._lock is not None and not self._is_held:
            self._is_held = self._lock.acquire(timeout=PATIENCE_S)

    def release(self) -> None:
        """Let another rank compute."""
        if self._lock is not None and self._is_held:
            self._is_held = False
            self._lock.release()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Compute in turns inside the block."""
        self.take()
        try:
            yield
        finally:
            self.release()


class ThreadWorld:
    """A world of `size` ranks, one per thread, that exchange tensors in this process's memory.

    >>> world = ThreadWorld(2)
    >>> comm = Comm(Mesh.parse("dp2"), 0, world.transport(0))     # in rank 0's thread

    Args:
        devices: one for each rank; CPU for all of them by default. Pieces are moved to the device
            of the output.
        timeout_s: how long a rank waits for the others of its group.
        late_after_s: how long a rank waits before it reports members that have not joined; see
            `Comm.on_late`.
        takes_turns: whether one rank computes at a time; see Note [Turns].
    """

    def __init__(
        self,
        size: int,
        *,
        devices: Sequence[torch.device | str] = (),
        timeout_s: float = 60.0,
        late_after_s: float = 10.0,
        takes_turns: bool = False,
    ) -> None:
        if devices and len(devices) != size:
            raise CommError(
                f"{counted(size, 'rank')} need {counted(size, 'device')}, got {len(devices)}"
            )
        self.size = size
        self._devices = tuple(torch.device(device) for device in devices or ("cpu",) * size)
        self._state = ThreadWorldState(size, timeout_s=timeout_s, late_after_s=late_after_s)
        self._shared_results = SharedResults()
        lock = threading.Lock() if takes_turns else None
        self.turns = tuple(Turn(lock) for _ in range(size))

    def transport(self, rank: int) -> Transport:
        """The transport of `rank`, for its thread."""
        if not 0 <= rank < self.size:
            raise CommError(f"rank {rank} is outside a world of {self.size}")
        device = self._devices[rank]
        return ThreadTransport(
            rank, self.size, device, self._state, self._shared_results, self.turns[rank]
        )

    def fail(self, rank: int, error: BaseException) -> None:
        """`rank` has failed: all that wait raise an error that names it. Only the first failure
        counts.
        """
        self._state.abort(CommError, f"rank {rank} failed first: {type(error).__name__}: {error}")

    def leave(self, rank: int) -> None:
        """`rank` has finished: those that wait for it raise at once."""
        self._state.finish(rank)


class ThreadTransport:
    """One rank's side of a `ThreadWorld`."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        state: ThreadWorldState,
        shared_results: SharedResults,
        turn: Turn,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.shared_results = shared_results
        self._state = state
        self._turn = turn
        self._home_thread: int | None = None

    def start(self, call: Call, on_late: OnLate) -> ThreadCall:
        """Join the group's next collective; the last member to join runs it at once."""
        thread = threading.get_ident()
        if self._home_thread is None:
            self._home_thread = thread
        if thread == self._home_thread:
            self._turn.take()  # it has none after it has polled
        collective = self._state.group(call).join(call)
        return ThreadCall(self._state, collective, call, on_late, self._home_thread, self._turn)


@dataclass(slots=True)
class ThreadCall:
    """A collective that this rank has joined."""

    state: ThreadWorldState
    collective: PendingCollective
    call: Call
    on_late: OnLate
    home_thread: int
    turn: Turn

    def wait(self) -> None:
        """Block until all members have joined; other ranks may compute meanwhile.

        Raises:
            MismatchError: their signatures differ.
            CommTimeout: some did not join in time, have finished, or wait for this rank.
            CommError: another rank has failed.
        """
        is_only_thread = threading.get_ident() == self.home_thread
        must_wait = is_only_thread and not self.collective.is_done
        if must_wait:
            self.turn.release()
        try:
            self.state.wait(
                self.collective, self.call, is_only_thread=is_only_thread, on_late=self.on_late
            )
        finally:
            if must_wait:
                self.turn.take()

    def is_completed(self) -> bool:
        """Whether all members have joined."""
        if self.collective.is_done:
            return True
        if threading.get_ident() == self.home_thread:
            self.turn.release()  # the others must compute for this to change
        return False


open_world = ThreadWorld
"""What makes a file of this folder a transport by name: see core/transports.py."""


def world_type(name: str) -> type[ThreadWorld]:
    """The world of the transport `weft/comm/<name>.py`.

    Raises:
        LaunchError: there is none.
    """
    known = thread_transports()
    if name not in known:
        need = ", ".join(known)
        what = "unknown transport between rank threads"
        raise LaunchError(
            Fault("transport", what, got=name, need=need, fix=did_you_mean(name, known))
        )
    found: type[ThreadWorld] = import_module(f"weft.comm.{name}").open_world
    return found
