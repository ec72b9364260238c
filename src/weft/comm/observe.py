"""Owns what can be seen of communication: the `Operation` record, who may look on, and the `Counter`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from weft.comm.transport import Call, Op


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank. The same object is handed to `started` and `finished`.

    `axis` is the mesh axis, or several joined by "+". `payload_bytes` is the size of the tensor that this rank brings
    (for recv and broadcast: receives). `sent_bytes` is what this rank sends if the operation is played as a ring;
    summed over the group it is what crosses the wires. n members, whole = the large tensor, own = this rank's piece:

        all_reduce      2 (n-1)/n whole     a reduce-scatter and an all-gather; rounded down to whole bytes
        all_gather      whole - next one's  each rank passes on every piece but that of the one after it: (n-1) pieces
        reduce_scatter  whole - own         (n-1)/n whole where pieces are even
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


class Observer(Protocol):
    """Who is told of every operation: `started` before it goes to the transport, `finished` when it was waited for."""

    def started(self, op: Operation) -> None: ...
    def finished(self, op: Operation) -> None: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """Operations and bytes, added up."""

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
    """Observer that adds up traffic per (axis, op); one may serve the ranks of several threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.traffic: dict[tuple[str, Op], Traffic] = {}

    def started(self, op: Operation) -> None:
        """Count `op`."""
        with self._lock:
            known = self.traffic.get((op.axis, op.op), Traffic())
            self.traffic[op.axis, op.op] = known + Traffic(1, op.payload_bytes, op.sent_bytes)

    def finished(self, op: Operation) -> None:
        """Nothing more to count."""

    def total(self) -> Traffic:
        """All axes and operations together."""
        with self._lock:
            return sum(self.traffic.values(), Traffic())


def operation(call: Call) -> Operation:
    """The record of `call`."""
    payload = _bytes(call.give) if call.give is not None else _bytes(call.take)
    sent = _SENT_BYTES.get(call.op, _nothing)(call)
    return Operation(call.op, call.axis, call.ranks, call.rank, payload, sent)


def _bytes(x: Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


def _nothing(call: Call) -> int:
    return 0


def _all_reduce(call: Call) -> int:
    return 2 * (len(call.ranks) - 1) * _bytes(call.take) // len(call.ranks)


def _all_gather(call: Call) -> int:
    assert call.take is not None, "all_gather takes the whole"
    following = call.take_counts[(call.index + 1) % len(call.ranks)]
    return (sum(call.take_counts) - following) * call.take.element_size()


def _all_but_own(call: Call) -> int:
    assert call.give is not None, f"{call.op} gives the whole"
    return (sum(call.give_counts) - call.give_counts[call.index]) * call.give.element_size()


def _broadcast(call: Call) -> int:
    return (len(call.ranks) - 1) * _bytes(call.take) if call.index == call.root else 0


def _gather(call: Call) -> int:
    return 0 if call.index == call.root else _bytes(call.give)


def _scatter(call: Call) -> int:
    return (len(call.ranks) - 1) * _bytes(call.take) if call.index == call.root else 0


_SENT_BYTES: dict[Op, Callable[[Call], int]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _all_but_own,
    "all_to_all": _all_but_own,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "send": lambda call: _bytes(call.give),
}
