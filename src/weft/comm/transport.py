"""The transport contract: a `Call` on flat buffers, a `PendingCall` while it runs, `Work` for callers; dry runs of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import TypeVar

from weft.errors import CommError

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
Communicator = Literal["group", "reductions"]
"""Calls of one group are matched in the order of their start, and run one after the other on GPUs.
"reductions" is a second communicator of the group, with an order of its own, where one was planned.
"""

GroupKey = tuple[bool, tuple[int, ...]]
"""Whether the group is an ordered pair for messages, and its world ranks."""

T = TypeVar("T", default=Tensor)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's part of one collective or message, on flat buffers: see Note [Flat calls].

    Attributes:
        axis: mesh axis, or several joined by "+"; for messages and diagnostics.
        ranks: world ranks of the group in mesh order; for send and recv: (source, destination).
        index: this rank's place in `ranks`.
        signature: operation, dtype and shape as text; members compare it.
        input, output: contiguous one-dimensional tensors.
        input_split_sizes: elements this rank sends to each member; () if all members pass the same
            shape.
        output_split_sizes: elements this rank receives from each member; () likewise.
        root: place of the root in `ranks`, for broadcast, gather and scatter.
        members: for send and recv: world ranks of the axis in mesh order.
        checked: whether members compare their signatures first, if that costs messages.
        communicator: which of the group's communicators carries the call.
        count: calls of the group that this rank had started before, as its monitor counts them; set
            where calls are carried by a device.
    """

    # Note [Flat calls]
    # A transport moves contiguous buffers and knows nothing of tensor dimensions: `comm/collectives.py` packs and
    # unpacks them.
    #
    #     op              input                     output                     split sizes
    #     all_reduce      -                         whole, in place            -
    #     all_gather      own piece                 all pieces, in order       input (own,)*n      output all pieces
    #     reduce_scatter  all pieces, in order      own piece                  input all pieces    output (own,)*n
    #     all_to_all      one piece per member      one piece per member       both
    #     broadcast       -                         whole, in place            -
    #     gather          whole                     at the root: n wholes      -
    #     scatter         at the root: n wholes     whole                      -
    #     send, recv      whole (source)            whole (destination)        -
    #
    # Neither buffer may be read or written by the caller until its `Work` has been waited for.

    op: Op
    axis: str
    ranks: tuple[int, ...]
    index: int
    signature: str
    input: Tensor | None = None
    output: Tensor | None = None
    input_split_sizes: tuple[int, ...] = ()
    output_split_sizes: tuple[int, ...] = ()
    reduce: Reduce = "sum"
    root: int = 0
    members: tuple[int, ...] = ()
    checked: bool = True
    communicator: Communicator = "group"
    count: int = 0

    @property
    def rank(self) -> int:
        """World rank of the caller."""
        return self.ranks[self.index]

    @property
    def required_input(self) -> Tensor:
        """`input`, of an operation that has one on this rank."""
        assert self.input is not None, f"{self.op} has an input"
        return self.input

    @property
    def required_output(self) -> Tensor:
        """`output`, of an operation that has one on this rank."""
        assert self.output is not None, f"{self.op} has an output"
        return self.output

    @property
    def device(self) -> torch.device:
        """The device of the tensors; the CPU without any."""
        tensor = self.output if self.output is not None else self.input
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def is_p2p(self) -> bool:
        """Whether this is a send or recv; messages of each ordered pair are matched in their own
        order.
        """
        return self.op in ("send", "recv")

    @property
    def group_key(self) -> GroupKey:
        """Calls with equal keys are matched in the order in which they are started."""
        return self.is_p2p, self.ranks

    @property
    def description(self) -> str:
        """Signature, axis and group: `all_reduce(sum) float32[4] over tp, ranks 0 1`."""
        separator = " -> " if self.is_p2p else " "
        members = separator.join(map(str, self.ranks))
        return f"{self.signature} over {self.axis}, ranks {members}"


class PendingCall(Protocol):
    """A started call."""

    def wait(self) -> None:
        """Block until the caller may use its buffers again; raise CommError if the call failed."""
        ...

    def is_completed(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        ...


OnLate = Callable[[Call, tuple[int, ...], float], None]
"""Called with a call that this rank waits for, the members that have not joined it, and the seconds
waited so far.
"""


class Channel(Protocol):
    """Where the calls of a group start: see `Transport.start`."""

    def start(self, call: Call, on_late: OnLate) -> PendingCall | None: ...


class Transport(Protocol):
    """Carries calls between ranks: threads of one process, processes, or none (`MetaTransport`)."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    def start(self, call: Call, on_late: OnLate) -> PendingCall | None:
        """Start `call` and return without waiting for other ranks; None if it is complete already.

        Calls of one group (and of one ordered pair, for messages) are matched in the order in which
        each rank starts them; there is no order between groups. `on_late` is called at most once
        per call, from any thread, when members have not joined the call after some seconds of
        waiting; the call goes on waiting until its time-out.
        """
        ...


@runtime_checkable
class ConnectsGroups(Protocol):
    """A transport that keeps what it needs for a group, so that it is found once."""

    def channel(self, axis: str, ranks: tuple[int, ...], *, communicator: Communicator) -> Channel:
        """Where the collectives of a group of this rank start."""
        ...


@runtime_checkable
class CarriesOnDevice(Protocol):
    """A transport whose calls may run on a device while the host goes on."""

    def report_device_calls(self, report: Callable[[Call | None], None]) -> None:
        """From now on `report` gets, from time to time and from a thread of the transport, the
        oldest call that the device has not completed, without its tensors; None: there is none.
        """
        ...


@runtime_checkable
class GroupsMessages(Protocol):
    """A transport that can launch several messages together."""

    def grouped_messages(self) -> AbstractContextManager[None]:
        """Messages on devices that are started inside the block are launched together at its end."""
        ...


@runtime_checkable
class ReportsFailure(Protocol):
    """A transport whose calls may end without their result after the host has gone on."""

    @property
    def failure(self) -> CommError | None:
        """Why calls were aborted; None if none was."""
        ...


@runtime_checkable
class NamesCarriers(Protocol):
    """A transport that tensors travel on in more than one way."""

    @property
    def carriers(self) -> frozenset[str]:
        """Names of the ways that were used, such as "gloo" and "shared memory"."""
        ...


@runtime_checkable
class SharesProcess(Protocol):
    """A transport between ranks that are threads of one process."""

    @property
    def shared_results(self) -> SharedResults:
        """One object for all ranks of the world."""
        ...


class SharedResults:
    """Results that the rank threads of a world compute once, by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key_locks: dict[Hashable, threading.Lock] = {}
        self._results: dict[Hashable, Any] = {}

    def get(self, key: Hashable, compute: Callable[[], R]) -> R:
        """The result for this key: computed by the first rank that asks, while the others wait for
        it. A rank that raises leaves it to the next one.
        """
        with self._lock:
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        # a lock for each key: what one result takes long to compute does not hold up the others
        with key_lock:
            if key not in self._results:
                self._results[key] = compute()
            found: R = self._results[key]
            return found


class Work(Generic[T]):
    """Handle of a started collective or message; `wait()` returns its result, any number of times.

    Args:
        pending: the call in the hands of a transport, None if it is complete.
        finish: makes the result; called once, by the first `wait`.
        failure_note: text to add to a CommError of `pending`.
    """

    def __init__(
        self,
        pending: PendingCall | None,
        finish: Callable[[], T],
        failure_note: Callable[[], str] = str,
    ) -> None:
        self._pending = pending
        self._finish: Callable[[], T] | None = finish
        self._failure_note: Callable[[], str] | None = failure_note
        self._result: T

    @staticmethod
    def done(result: T) -> Work[T]:
        """Work that is complete, with this result."""
        work: Work[T] = Work.__new__(Work)
        work._pending = None
        work._finish = None
        work._failure_note = None
        work._result = result
        return work

    def wait(self) -> T:
        """Block until the operation is complete and return its result.

        Raises:
            MismatchError: the ranks called different operations, shapes or dtypes.
            CommTimeout: some ranks did not join within the time-out.
            CommError: a connection was lost, or another rank failed.
        """
        if self._finish is not None:
            if self._pending is not None:
                try:
                    self._pending.wait()
                except CommError as error:
                    if self._failure_note is not None:
                        error.add_note(self._failure_note())
                    raise
            self._result = self._finish()
            self._pending = None  # these three hold the buffers of the call
            self._finish = None
            self._failure_note = None
        return self._result

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._pending is None or self._pending.is_completed()


class MetaTransport:
    """Rank `rank` of a world of `size`; the other ranks do not exist.

    Results have the right shapes and dtypes. In-place reductions and broadcasts leave their tensor
    as it is, all other outputs on real devices are zeros: meaningless, but finite and reproducible.
    """

    def __init__(self, size: int, rank: int, *, device: str | torch.device = "meta") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)

    def start(self, call: Call, on_late: OnLate) -> None:
        """Complete `call` at once."""
        output = call.output
        is_in_place = call.op in ("all_reduce", "broadcast")
        if output is None or output.is_meta or is_in_place:
            return
        output.zero_()


class SharedMetaTransport(MetaTransport):
    """A `MetaTransport` of a rank that is played after others of its world in one process.

    Args:
        shared_results: of all these ranks.
    """

    def __init__(self, size: int, rank: int, *, shared_results: SharedResults) -> None:
        super().__init__(size, rank)
        self.shared_results = shared_results
