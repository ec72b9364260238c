"""Observation of communication: `Observer` of operations, `CallMonitor` and `CallProfiler` of waits, `Counter`, late ranks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from weft.comm.signature import NO_SIGNATURE, Signature
from weft.comm.transport import Call, Communicator, Op, PendingCall
from weft.core.mesh import Mesh

MAX_RANKS_IN_NOTE = 16
"""Members whose coordinates are listed in the note of an error."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank. The same object is passed to `started` and `finished`.

    `axis` is the mesh axis, or several joined by "+". `payload_bytes` is the size of this rank's
    input (for recv and broadcast: output). `signature` is what the members of the group compare,
    `communicator` which of the group's communicators was asked for: backends that connect groups at
    their first use (gloo) have one for both, see `communicator` in `comm/transport.py`.
    `sent_bytes` is what this rank sends with a ring algorithm; its sum over the group is what
    crosses the network. With n members, whole = the large tensor, own = this rank's piece:

        all_reduce      2 (n-1)/n whole     a reduce-scatter and an all-gather; rounded down to whole bytes
        all_gather      whole - next one's  each rank forwards every piece but that of the next rank: (n-1) pieces
        reduce_scatter  whole - own         (n-1)/n whole with equal pieces
        all_to_all      whole - own         what leaves this rank
        broadcast       (n-1) whole         at the root, else 0
        gather          own                 0 at the root
        scatter         whole - own         at the root, else 0
        send            whole
        recv, barrier   0
    """

    op: Op
    axis: str
    group: tuple[int, ...]
    rank: int
    payload_bytes: int
    sent_bytes: int
    signature: Signature = NO_SIGNATURE
    communicator: Communicator = "group"

    @property
    def is_p2p(self) -> bool:
        """Whether this is a send or recv, whose group is (source, destination)."""
        return self.op in ("send", "recv")


class Observer(Protocol):
    """Sees every operation of a `Comm`: `started` before the transport gets it, `finished` once it
    was waited for.
    """

    def started(self, op: Operation) -> None: ...
    def finished(self, op: Operation) -> None: ...


class CallMonitor(Protocol):
    """Sees which call a rank is in: `started` before the transport gets it, `waiting` and
    `finished` around the wait for it; `on_device`, from another thread, which call its device is in.
    """

    def started(self, call: Call) -> int:
        """The position of `call` among the calls of its group on this rank."""
        ...

    def waiting(self, call: Call, position: int) -> None: ...
    def finished(self) -> None: ...
    def on_device(self, call: Call | None) -> None: ...


class CallProfiler(Protocol):
    """Sees when each call of a rank is started and waited for, while a profile is recorded."""

    def begin_call(self, call: Call) -> Any:
        """The time before a call is handed over."""
        ...

    def call_started(self, call: Call, begin: Any) -> list[Any]:
        """The record of a call that was begun at this time; others may join it already."""
        ...

    def begin_wait(self, record: list[Any]) -> None: ...
    def end_wait(self, record: list[Any]) -> None: ...


@dataclass
class WaitClock:
    """Time that a rank has spent waiting for calls.

    Attributes:
        waited_s: seconds in all.
    """

    waited_s: float = 0.0


@dataclass(slots=True, eq=False)
class ObservedCall:
    """A pending call whose wait is reported, recorded and timed, by those of the three that are there.

    The recorder sees the whole wait. The clock adds up what the transport takes and what the monitor
    does around it.
    """

    pending: PendingCall
    call: Call
    position: int
    record: list[Any] | None
    monitor: CallMonitor | None
    recorder: CallProfiler | None
    clock: WaitClock | None

    def wait(self) -> None:
        """Block until the call is complete."""
        monitor, recorder, record = self.monitor, self.recorder, self.record
        if recorder is not None and record is not None:
            recorder.begin_wait(record)
        start_s = time.perf_counter()
        if monitor is not None:
            monitor.waiting(self.call, self.position)
        try:
            self.pending.wait()
        finally:
            if monitor is not None:
                monitor.finished()
            if self.clock is not None:
                self.clock.waited_s += time.perf_counter() - start_s
            if recorder is not None and record is not None:
                recorder.end_wait(record)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self.pending.is_completed()


@dataclass(frozen=True, slots=True)
class LateRanks:
    """Members of a group that have not joined a call for which `rank` waits; it waits on, up to its
    time-out.

    Attributes:
        call: operation, dtype, shape, axis and group, e.g. `all_reduce(sum) float32[4] over dp,
            ranks 0 1 2`.
        rank: world rank that waits.
        missing: world ranks that have not joined.
        coordinates: mesh coordinates of `rank` and of each rank in `missing`, e.g. {1: "dp1 tp0"}.
        waited_s: seconds that `rank` has waited.
    """

    call: str
    rank: int
    missing: tuple[int, ...]
    coordinates: dict[int, str]
    waited_s: float

    def __str__(self) -> str:
        waiting = self._with_coordinates(self.rank)
        missing = [self._with_coordinates(rank) for rank in self.missing]
        have = "has" if len(missing) == 1 else "have"
        late = f"{', '.join(missing)} {have} not arrived"
        return f"{waiting} has waited {self.waited_s:.3g} s in {self.call}: {late}; still waiting"

    def _with_coordinates(self, rank: int) -> str:
        return f"rank {rank} ({self.coordinates[rank]})"


def late_ranks(
    call: Call, missing: tuple[int, ...], waited_s: float, *, mesh: Mesh, rank: int
) -> LateRanks:
    """What `rank` reports of a call that it waits for."""
    coordinates = {each: mesh.coord_text(each) for each in (rank, *missing)}
    return LateRanks(call.description, rank, missing, coordinates, waited_s)


def failure_note(call: Call, mesh: Mesh, rank: int) -> str:
    """`reported by rank 0 (tp0) of mesh tp2; ranks: 0 = tp0, 1 = tp1`."""
    members = [f"{each} = {mesh.coord_text(each)}" for each in call.ranks[:MAX_RANKS_IN_NOTE]]
    reporter = f"rank {rank} ({mesh.coord_text(rank)}) of mesh {mesh}"
    return f"reported by {reporter}; ranks: {', '.join(members)}"


def print_late_ranks(late: LateRanks) -> None:
    """Print a note on stderr: the default of `Comm.on_late`."""
    sys.stderr.write(f"note: {late}\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Traffic:
    """Totals of operations and bytes."""

    operations: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.operations + other.operations,
            self.payload_bytes + other.payload_bytes,
            self.sent_bytes + other.sent_bytes,
        )


class Counter:
    """Observer that adds up traffic per (axis, op); one may be shared by the ranks of several
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.traffic: dict[tuple[str, Op], Traffic] = {}

    def started(self, op: Operation) -> None:
        """Count the operation."""
        key = (op.axis, op.op)
        one = Traffic(operations=1, payload_bytes=op.payload_bytes, sent_bytes=op.sent_bytes)
        with self._lock:
            self.traffic[key] = self.traffic.get(key, Traffic()) + one

    def finished(self, op: Operation) -> None:
        """Do nothing: operations are counted when they start."""

    def total(self) -> Traffic:
        """Sum over all axes and operations."""
        with self._lock:
            return sum(self.traffic.values(), Traffic())


def operation(call: Call) -> Operation:
    """The record of `call`."""
    payload = call.input if call.input is not None else call.output
    count_sent = _SENT_BYTES.get(call.op)
    return Operation(
        op=call.op,
        axis=call.axis,
        group=call.ranks,
        rank=call.rank,
        payload_bytes=_num_bytes(payload),
        sent_bytes=0 if count_sent is None else count_sent(call),
        signature=Signature.of(call),
        communicator=call.communicator,
    )


def _num_bytes(x: Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


def _all_reduce(call: Call) -> int:
    size = len(call.ranks)
    return 2 * (size - 1) * _num_bytes(call.output) // size


def _all_gather(call: Call) -> int:
    sizes = call.output_split_sizes
    next_index = (call.index + 1) % len(sizes)
    sent_numel = sum(sizes) - sizes[next_index]
    return sent_numel * call.required_output.element_size()


def _all_but_own(call: Call) -> int:
    sizes = call.input_split_sizes
    sent_numel = sum(sizes) - sizes[call.index]
    return sent_numel * call.required_input.element_size()


def _from_root(call: Call) -> int:
    is_root = call.index == call.root
    return (len(call.ranks) - 1) * _num_bytes(call.output) if is_root else 0


def _to_root(call: Call) -> int:
    is_root = call.index == call.root
    return 0 if is_root else _num_bytes(call.input)


def _send(call: Call) -> int:
    return _num_bytes(call.input)


_SENT_BYTES: dict[Op, Callable[[Call], int]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _all_but_own,
    "all_to_all": _all_but_own,
    "broadcast": _from_root,
    "gather": _to_root,
    "scatter": _from_root,
    "send": _send,
}
