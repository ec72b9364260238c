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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.backends import reduce_in_order
from weft.comm.collectives import concatenated
from weft.comm.signature import Signature, check_signatures
from weft.comm.transport import Call, GroupKey, OnLate, Op, SharedResults, Transport
from weft.core.mesh import rank_list
from weft.core.transports import thread_transports
from weft.errors import CommError, CommTimeout, Fault, LaunchError, counted, did_you_mean

RunCollective = Callable[[Sequence[Call]], None]


def run_collective(calls: Sequence[Call]) -> None:
    """Run one collective or message; `calls` are those of all members in group order, with matching
    signatures.

    Tensors may live on different devices: pieces move to the device of the output. Dispatch modes
    of the calling thread (memory or FLOP counters) are disabled, since it works for all members
    here.
    """
    run = _RUN[calls[0].op]
    has_dispatch_modes = (
        torch._C._len_torch_dispatch_stack() > 0
    )  # checked first: disabling none costs 25 us
    with torch.no_grad(), _disable_current_modes() if has_dispatch_modes else nullcontext():
        run(calls)


def _all_reduce(calls: Sequence[Call]) -> None:
    # all outputs are also the inputs: the total is complete before any of them is overwritten
    outputs = [call.required_output for call in calls]
    total = reduce_in_order(outputs, calls[0].reduce)
    for output in outputs:
        output.copy_(total)


def _all_gather(calls: Sequence[Call]) -> None:
    pieces = [call.required_input for call in calls]
    whole = _concatenated(pieces, calls[0])
    for call in calls:
        call.required_output.copy_(whole)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    pieces_of_member = [_split_input(call) for call in calls]
    for call in calls:
        own_pieces = [pieces[call.index] for pieces in pieces_of_member]
        total = reduce_in_order(own_pieces, call.reduce)
        call.required_output.copy_(total)


def _all_to_all(calls: Sequence[Call]) -> None:
    pieces_of_member = [_split_input(call) for call in calls]
    for call in calls:
        own_pieces = [pieces[call.index] for pieces in pieces_of_member]
        whole = _concatenated(own_pieces, call)
        call.required_output.copy_(whole)


def _broadcast(calls: Sequence[Call]) -> None:
    root = _root(calls)
    for call in calls:
        if call is not root:
            call.required_output.copy_(root.required_output)


def _gather(calls: Sequence[Call]) -> None:
    root = _root(calls)
    wholes = [call.required_input for call in calls]
    gathered = _concatenated(wholes, root)
    root.required_output.copy_(gathered)


def _scatter(calls: Sequence[Call]) -> None:
    outputs = [call.required_output for call in calls]
    is_empty = outputs[0].numel() == 0
    if is_empty:
        return
    root = _root(calls)
    wholes = root.required_input.chunk(len(calls))
    for output, whole in zip(outputs, wholes, strict=True):
        output.copy_(whole)


def _message(calls: Sequence[Call]) -> None:
    source, destination = calls
    destination.required_output.copy_(source.required_input)


def _barrier(calls: Sequence[Call]) -> None:
    pass


_RUN: dict[Op, RunCollective] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "send": _message,
    "barrier": _barrier,
}


def _root(calls: Sequence[Call]) -> Call:
    place = calls[0].root
    return calls[place]


def _split_input(call: Call) -> tuple[Tensor, ...]:
    return torch.split(call.required_input, list(call.input_split_sizes))


def _concatenated(tensors: Sequence[Tensor], call: Call) -> Tensor:
    """`tensors` joined on the device of the output of `call`."""
    device = call.required_output.device
    moved = [tensor.to(device) for tensor in tensors]
    return concatenated(moved)


WAIT_SLICE_S = 1.0
"""A rank that waits longer than this looks for deadlocks each time it has passed."""


class PendingCollective:
    """One collective or message: the calls that have joined, and how it ended. The last member to
    join runs it.
    """

    __slots__ = ("calls", "error", "is_done", "is_reported", "num_missing", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls: list[Call | None] = [None] * len(ranks)
        self.num_missing = len(ranks)
        self.is_done = False
        self.is_reported = False
        self.error: CommError | None = None

    def add(self, call: Call) -> bool:
        """Join with `call`; whether it was the last member."""
        self.calls[call.index] = call
        self.num_missing -= 1
        return self.num_missing == 0

    def run(self) -> None:
        """Check the signatures of all members and run the collective."""
        calls = [call for call in self.calls if call is not None]
        first = calls[0]
        signatures = [Signature.of(call) for call in calls]
        try:
            check_signatures(first.axis, first.ranks, signatures)
            run_collective(calls)
        except CommError as error:
            self.error = error
        except (RuntimeError, TypeError, ValueError) as error:
            self.error = CommError(f"{first.description}: {error}")

    def missing(self) -> tuple[int, ...]:
        """World ranks that have not joined; () once it is done."""
        pairs = zip(self.ranks, self.calls, strict=False)  # `calls` is emptied once it is done
        return tuple(rank for rank, call in pairs if call is None)


class GroupState:
    """Collectives of one group, with its own lock and condition, so that groups do not wake each
    other.
    """

    __slots__ = ("condition", "num_started", "pending", "ranks")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.condition = threading.Condition(threading.Lock())
        self.pending: dict[int, PendingCollective] = {}
        self.num_started = [0] * len(ranks)

    def join(self, call: Call) -> PendingCollective:
        """Join this member's next collective; the last member to join runs it."""
        with self.condition:
            position = self.num_started[call.index]
            self.num_started[call.index] = position + 1
            # matched by position: the n-th call of each member belongs to the n-th of the others
            collective = self.pending.get(position)
            if collective is None:
                collective = PendingCollective(self.ranks)
                self.pending[position] = collective
            if not collective.add(call):
                return collective
            del self.pending[position]
        # outside of the lock: members that join later calls of the group need not wait for the copies
        collective.run()
        with self.condition:
            # the tensors of all members are free from here on, though the handles of some may live longer
            collective.calls = []
            collective.is_done = True
            self.condition.notify_all()
        return collective


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
        self.timeout_s = timeout_s
        self.late_after_s = late_after_s
        self.devices = tuple(torch.device(device) for device in devices or ("cpu",) * size)
        self.shared_results = SharedResults()
        lock = threading.Lock() if takes_turns else None
        self.turns = tuple(Turn(lock) for _ in range(size))
        self._groups: dict[GroupKey, GroupState] = {}
        self._lock = threading.Lock()
        self._aborted: CommError | None = None  # which all that wait raise, now or later
        self._finished: set[int] = set()
        self._stuck: dict[int, ThreadCall] = {}  # by rank: those whose only thread waits

    def transport(self, rank: int) -> Transport:
        """The transport of `rank`, for its thread."""
        if not 0 <= rank < self.size:
            raise CommError(f"rank {rank} is outside a world of {self.size}")
        return ThreadTransport(rank, self)

    def fail(self, rank: int, error: BaseException) -> None:
        """`rank` has failed: all that wait raise an error that names it. Only the first failure
        counts.
        """
        what = CommError(f"rank {rank} failed first: {type(error).__name__}: {error}")
        with self._lock:
            self._aborted = self._aborted or what
        self._wake_all()

    def leave(self, rank: int) -> None:
        """`rank` has finished: those that wait for it raise at once."""
        self._finished.add(rank)
        self._wake_all()

    def group(self, call: Call) -> GroupState:
        """State of the group of `call`; each ordered pair has one for its messages."""
        key = call.group_key
        group = self._groups.get(key)
        if group is None:
            new_group = GroupState(call.ranks)
            # atomic: of two ranks that come at once both get the same group
            group = self._groups.setdefault(key, new_group)
        return group

    def wait_for(self, waiter: ThreadCall, *, is_only_thread: bool) -> None:
        """Block until the collective of `waiter` is done; `is_only_thread`: while it blocks, the
        rank can start no other call.

        Raises:
            CommError: another rank has failed, or the rest of its members cannot join any more.
        """
        start_s = time.monotonic()
        deadline_s = start_s + self.timeout_s
        late_at_s = start_s + self.late_after_s
        try:
            is_done = self._wait_until(min(late_at_s, deadline_s), waiter, is_only_thread)
            if not is_done and late_at_s < deadline_s:
                self._report_late(waiter)
                is_done = self._wait_until(deadline_s, waiter, is_only_thread)
        finally:
            # also after an error: a rank that goes on to other calls is no part of a deadlock
            self._stuck.pop(waiter.call.rank, None)
        if not is_done:
            raise CommTimeout(self._timeout_message(waiter))

    def _wait_until(self, deadline_s: float, waiter: ThreadCall, is_only_thread: bool) -> bool:
        """Whether the collective is done before `deadline_s` on the monotonic clock."""
        collective, call = waiter.collective, waiter.call
        condition = self.group(call).condition
        with condition:
            while not collective.is_done:
                self._raise_if_hopeless(waiter)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                is_notified = condition.wait(min(left_s, WAIT_SLICE_S))
                if not is_notified and is_only_thread:
                    self._stuck[call.rank] = waiter
        return True

    def _report_late(self, waiter: ThreadCall) -> None:
        """Report the members that have not joined; only the first waiter of a collective does."""
        collective = waiter.collective
        with self._lock:
            is_first = not collective.is_reported
            collective.is_reported = True
        missing = collective.missing()
        if is_first and missing:
            waiter.on_late(waiter.call, missing, self.late_after_s)

    def _raise_if_hopeless(self, waiter: ThreadCall) -> None:
        description = waiter.call.description
        if self._aborted is not None:
            # an error of its own for each rank: one object raised in several threads would mix their tracebacks
            raise type(self._aborted)(f"{description}: {self._aborted}")
        missing = waiter.collective.missing()
        finished = [rank for rank in missing if rank in self._finished]
        if finished:
            raise CommTimeout(f"{description}: {rank_list(finished)} finished without joining")
        num_idle = len(self._stuck) + len(self._finished)
        if num_idle >= self.size:
            self._raise_if_deadlocked(waiter)

    def _raise_if_deadlocked(self, waiter: ThreadCall) -> None:
        stuck = dict(self._stuck)
        # one of them is only late to wake up, and will start further calls
        is_any_done = any(other.collective.is_done for other in stuck.values())
        if waiter.call.rank not in stuck or is_any_done:
            return
        waits = [str(stuck[rank]) for rank in sorted(stuck)]
        what = CommTimeout(f"deadlock, every rank waits: {'; '.join(waits)}")
        with self._lock:
            self._aborted = self._aborted or what
        raise CommTimeout(str(self._aborted))

    def _timeout_message(self, waiter: ThreadCall) -> str:
        call = waiter.call
        missing = waiter.collective.missing()
        present = [rank for rank in call.ranks if rank not in missing]
        late = f"{rank_list(missing)} did not arrive within {self.timeout_s:g} s"
        return f"{call.description}: {late}; present: {rank_list(present)}"

    def _wake_all(self) -> None:
        for group in list(self._groups.values()):
            with group.condition:
                group.condition.notify_all()


class ThreadTransport:
    """One rank's side of a `ThreadWorld`."""

    def __init__(self, rank: int, world: ThreadWorld) -> None:
        self.rank, self.size, self.device = rank, world.size, world.devices[rank]
        self.shared_results = world.shared_results
        self._world = world
        self._turn = world.turns[rank]
        self._home_thread: int | None = None

    def start(self, call: Call, on_late: OnLate) -> ThreadCall:
        """Join the group's next collective; the last member to join runs it at once."""
        thread = threading.get_ident()
        if self._home_thread is None:
            self._home_thread = thread
        if thread == self._home_thread:
            self._turn.take()  # it has none after it has polled
        collective = self._world.group(call).join(call)
        return ThreadCall(self._world, collective, call, on_late, self._home_thread, self._turn)


@dataclass(slots=True)
class ThreadCall:
    """A collective that this rank has joined."""

    world: ThreadWorld
    collective: PendingCollective
    call: Call
    on_late: OnLate
    home_thread: int
    turn: Turn

    def __str__(self) -> str:
        missing = rank_list(self.collective.missing())
        return f"rank {self.call.rank} at {self.call.description}, for {missing}"

    def wait(self) -> None:
        """Block until all members have joined; other ranks may compute meanwhile.

        Raises:
            MismatchError: their signatures differ.
            CommTimeout: some did not join in time, have finished, or wait for this rank.
            CommError: another rank has failed.
        """
        collective = self.collective
        if not collective.is_done:
            is_only_thread = threading.get_ident() == self.home_thread
            if is_only_thread:
                self.turn.release()
            try:
                self.world.wait_for(self, is_only_thread=is_only_thread)
            finally:
                if is_only_thread:
                    self.turn.take()
        if collective.error is not None:
            # a copy, as above: every member raises it in its own thread
            raise type(collective.error)(*collective.error.args)

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
