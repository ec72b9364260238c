"""Owns what a transport is: one `Call` in, one `Pending` out; and `Work`, the handle that callers hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

Op = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]
Reduce = Literal["sum", "avg", "max", "min", "product"]

T = TypeVar("T", default=Tensor)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's part of one operation, brought down to flat memory: see Note [Flat calls].

    `ranks` is the group in mesh order and `index` this rank's place in it; for send and recv: (source, destination).
    `give` and `take` are contiguous one-dimensional tensors. `give_counts[j]` is how many elements this rank gives to
    member j, `take_counts[j]` how many it takes from member j; both are () where every member brings the same shape.
    """

    # Note [Flat calls]
    # A transport moves pieces of flat memory, it never hears of tensor dimensions: `comm/pieces.py` packs and unpacks.
    #
    #     op              give                      take                       counts
    #     all_reduce      -                         the whole, in place        -
    #     all_gather      own piece                 every piece, in order      give (own,)*n    take every piece
    #     reduce_scatter  every piece, in order     own piece                  give every piece take (own,)*n
    #     all_to_all      a piece for each          a piece from each          both
    #     broadcast       -                         the whole, in place        -
    #     gather          the whole                 at the root: n wholes      -
    #     scatter         at the root: n wholes     the whole                  -
    #     send, recv      the whole (source)        the whole (destination)    -
    #
    # Both tensors belong to the operation until its `Work` has been waited for.

    op: Op
    axis: str
    ranks: tuple[int, ...]
    index: int
    brings: str
    give: Tensor | None = None
    take: Tensor | None = None
    give_counts: tuple[int, ...] = ()
    take_counts: tuple[int, ...] = ()
    reduce: Reduce = "sum"
    root: int = 0
    checked: bool = True

    @property
    def rank(self) -> int:
        """World rank of the caller."""
        return self.ranks[self.index]

    @property
    def is_p2p(self) -> bool:
        """Whether this is a message along one ordered pair, with an order of its own."""
        return self.op in ("send", "recv")

    @property
    def where(self) -> str:
        """What, along which axis, among whom: `all_reduce(sum) float32[4] over tp, ranks 0 1`."""
        members = " -> ".join(map(str, self.ranks)) if self.is_p2p else " ".join(map(str, self.ranks))
        return f"{self.brings} over {self.axis}, ranks {members}"


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Block until the caller's tensors are its own again; raise what went wrong."""
        ...

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...


class Transport(Protocol):
    """What carries calls between ranks: threads, processes, or nobody at all."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def start(self, call: Call) -> Pending:
        """Begin `call` and return without waiting for other ranks.

        Calls of one group (and of one ordered pair, for messages) are matched in the order in which each rank starts
        them; between groups there is no order.
        """
        ...


class Work(Generic[T]):
    """Handle of a started operation: `wait()` gives its result, as often as asked."""

    def __init__(self, pending: Pending, finish: Callable[[], T]) -> None:
        self._pending: Pending | None = pending
        self._finish = finish
        self._result: T

    @staticmethod
    def done(result: T) -> Work[T]:
        """Work that is finished before it began."""
        work: Work[T] = Work.__new__(Work)
        work._pending, work._result = None, result
        return work

    def wait(self) -> T:
        """Block until the operation is done and return its result.

        Raises:
            MismatchError: ranks brought different operations, shapes or dtypes.
            CommTimeout: some ranks did not come in time.
        """
        if self._pending is not None:
            self._pending.wait()
            self._result = self._finish()
            self._pending = None
            del self._finish
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending is None or self._pending.is_completed()
