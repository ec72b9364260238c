"""Rendezvous of rank threads: who has joined a collective, who waits, and running it for all its members."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.backends import reduce_in_order
from weft.comm.signature import Signature, check_signatures
from weft.comm.transport import Call, GroupKey, OnLate, Op
from weft.core.mesh import rank_list
from weft.errors import CommError, CommTimeout

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
    return torch.cat(moved)


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
        missing = []
        for rank, call in zip(
            self.ranks, self.calls, strict=False
        ):  # `calls` is emptied once it is done
            if call is None:
                missing.append(rank)
        return tuple(missing)


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
            collective = self.pending.get(position)
            if collective is None:
                collective = PendingCollective(self.ranks)
                self.pending[position] = collective
            if not collective.add(call):
                return collective
            del self.pending[position]
        collective.run()
        with self.condition:
            collective.calls = []
            collective.is_done = True
            self.condition.notify_all()
        return collective


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A rank that waits for a collective."""

    collective: PendingCollective
    call: Call

    def __str__(self) -> str:
        missing = rank_list(self.collective.missing())
        return f"rank {self.call.rank} at {self.call.description}, for {missing}"


@dataclass(frozen=True, slots=True)
class _Abort:
    """The error that all waiting ranks raise."""

    kind: type[CommError]
    message: str


class ThreadWorldState:
    """Groups of a world of threads; ranks that have finished, ranks that are stuck, and the error
    that aborts all.

    Args:
        size: number of ranks.
        timeout_s: how long a rank waits for the others of a group.
        late_after_s: how long a rank waits before members that have not joined are reported.
    """

    def __init__(self, size: int, *, timeout_s: float, late_after_s: float) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.late_after_s = late_after_s
        self._groups: dict[GroupKey, GroupState] = {}
        self._lock = threading.Lock()
        self._aborted: _Abort | None = None
        self._finished: set[int] = set()
        self._stuck: dict[int, _Waiter] = {}  # by rank: those whose only thread waits

    def group(self, call: Call) -> GroupState:
        """State of the group of `call`; each ordered pair has one for its messages."""
        key = call.group_key
        group = self._groups.get(key)
        if group is None:
            new_group = GroupState(call.ranks)
            group = self._groups.setdefault(key, new_group)
        return group

    def abort(self, kind: type[CommError], message: str) -> None:
        """Make all that wait, now or later, raise this error. The first call counts."""
        with self._lock:
            self._aborted = self._aborted or _Abort(kind, message)
        self._wake_all()

    def finish(self, rank: int) -> None:
        """`rank` starts no more calls: those that wait for it raise."""
        self._finished.add(rank)
        self._wake_all()

    def wait(
        self, collective: PendingCollective, call: Call, *, is_only_thread: bool, on_late: OnLate
    ) -> None:
        """Block until `collective` is done; `is_only_thread`: while it blocks, the rank can start
        no other call.

        Raises:
            CommError: the collective failed, another rank has failed, or the rest of its members
                cannot join any more.
        """
        if not collective.is_done:
            try:
                self._wait_or_raise(_Waiter(collective, call), is_only_thread, on_late)
            finally:
                self._stuck.pop(call.rank, None)
        if collective.error is not None:
            raise type(collective.error)(*collective.error.args)

    def _wait_or_raise(self, waiter: _Waiter, is_only_thread: bool, on_late: OnLate) -> None:
        start_s = time.monotonic()
        deadline_s = start_s + self.timeout_s
        late_at_s = start_s + self.late_after_s
        is_done = self._wait_until(min(late_at_s, deadline_s), waiter, is_only_thread)
        if not is_done and late_at_s < deadline_s:
            self._report_late(waiter, on_late)
            is_done = self._wait_until(deadline_s, waiter, is_only_thread)
        if not is_done:
            raise CommTimeout(self._timeout_message(waiter))

    def _wait_until(self, deadline_s: float, waiter: _Waiter, is_only_thread: bool) -> bool:
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

    def _report_late(self, waiter: _Waiter, on_late: OnLate) -> None:
        """Report the members that have not joined; only the first waiter of a collective does."""
        collective = waiter.collective
        with self._lock:
            is_first = not collective.is_reported
            collective.is_reported = True
        missing = collective.missing()
        if is_first and missing:
            on_late(waiter.call, missing, self.late_after_s)

    def _raise_if_hopeless(self, waiter: _Waiter) -> None:
        description = waiter.call.description
        if self._aborted is not None:
            raise self._aborted.kind(f"{description}: {self._aborted.message}")
        missing = waiter.collective.missing()
        finished = [rank for rank in missing if rank in self._finished]
        if finished:
            raise CommTimeout(f"{description}: {rank_list(finished)} finished without joining")
        num_idle = len(self._stuck) + len(self._finished)
        if num_idle >= self.size:
            self._raise_if_deadlocked(waiter)

    def _raise_if_deadlocked(self, waiter: _Waiter) -> None:
        stuck = dict(self._stuck)
        is_any_done = any(other.collective.is_done for other in stuck.values())
        if waiter.call.rank not in stuck or is_any_done:
            return
        waits = [str(stuck[rank]) for rank in sorted(stuck)]
        message = f"deadlock, every rank waits: {'; '.join(waits)}"
        with self._lock:
            self._aborted = self._aborted or _Abort(CommTimeout, message)
        raise CommTimeout(self._aborted.message)

    def _timeout_message(self, waiter: _Waiter) -> str:
        call = waiter.call
        missing = waiter.collective.missing()
        present = [rank for rank in call.ranks if rank not in missing]
        late = f"{rank_list(missing)} did not arrive within {self.timeout_s:g} s"
        return f"{call.description}: {late}; present: {rank_list(present)}"

    def _wake_all(self) -> None:
        for group in list(self._groups.values()):
            with group.condition:
                group.condition.notify_all()
