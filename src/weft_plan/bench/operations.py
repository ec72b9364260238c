"""One collective with inputs whose results are known: every element is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.errors import CommError
from weft_plan.bench.bandwidth import OperationName

DTYPE = torch.float32
PERIOD = 7
"""Elements repeat 0, 1, ..., 6: whole numbers, whose sums over 10^6 ranks are exact."""


@dataclass(frozen=True)
class KnownOperation:
    """A collective on fixed inputs.

    Attributes:
        run: starts it, waits, and returns what this rank has got; None: nothing.
        expected: what it must get.
        size_bytes: S, see `weft_plan.bench.bandwidth`.
    """

    name: OperationName
    run: Callable[[], Tensor | None]
    expected: Tensor | None
    size_bytes: int

    def check(self, result: Tensor | None, comm: Comm, axis: str) -> int:
        """Compare every element of what `run` has returned; the number of elements.

        Raises:
            CommError: an element differs.
        """
        if result is None or self.expected is None:
            return 0
        num_wrong = int((result != self.expected).sum())
        if num_wrong:
            count = f"{num_wrong} of {result.numel()} elements"
            where = f"{self.name} of {self.size_bytes} bytes over {axis}, ranks {comm.group(axis)}"
            raise CommError(f"{where}: {count} are wrong on rank {comm.rank}")
        return result.numel()


@dataclass(frozen=True)
class _ExpectedCall:
    """A collective on fixed inputs: what runs it, and what it must return on this rank."""

    run: Callable[[], Tensor | None]
    expected: Tensor | None


def known_operation(name: OperationName, comm: Comm, axis: str, size_bytes: int) -> KnownOperation:
    """The collective of this size over an axis, rounded up to one element for each member."""
    members = comm.degree(axis)
    piece_bytes = size_bytes // members
    piece = max(1, piece_bytes // DTYPE.itemsize)
    inputs = _Inputs(comm, axis, piece)
    call = _MAKERS[name](inputs)
    return KnownOperation(
        name=name, run=call.run, expected=call.expected, size_bytes=piece * members * DTYPE.itemsize
    )


@dataclass(frozen=True)
class _Inputs:
    """Tensors of a rank: `piece` elements for each member of its group."""

    comm: Comm
    axis: str
    piece: int

    @property
    def members(self) -> int:
        return self.comm.degree(self.axis)

    @property
    def index(self) -> int:
        return self.comm.index(self.axis)

    def counted(self, num_pieces: int, offset: int) -> Tensor:
        """0, 1, ..., 6, 0, ..., each plus `offset`."""
        numel = num_pieces * self.piece
        numbers = torch.arange(numel, dtype=DTYPE, device=self.comm.device)
        return numbers % PERIOD + offset

    def whole(self, offset: int) -> Tensor:
        return self.counted(self.members, offset)

    def own(self, offset: int) -> Tensor:
        return self.counted(1, offset)

    def summed(self) -> Tensor:
        """The sum over members of what member i calls `whole(i)`."""
        sum_of_offsets = self.members * (self.members - 1) // 2
        return self.whole(0) * self.members + sum_of_offsets

    def joined(self, offsets: Iterable[int]) -> Tensor:
        """Pieces with these offsets, one behind the other."""
        pieces = [self.own(offset) for offset in offsets]
        return torch.cat(pieces)


def _all_reduce(inputs: _Inputs) -> _ExpectedCall:
    x = inputs.whole(inputs.index)
    return _ExpectedCall(
        run=lambda: inputs.comm.all_reduce(x, inputs.axis), expected=inputs.summed()
    )


def _all_gather(inputs: _Inputs) -> _ExpectedCall:
    x = inputs.own(inputs.index)
    members = range(inputs.members)
    return _ExpectedCall(
        run=lambda: inputs.comm.all_gather(x, inputs.axis), expected=inputs.joined(members)
    )


def _reduce_scatter(inputs: _Inputs) -> _ExpectedCall:
    x = inputs.whole(inputs.index)
    shards = inputs.summed().chunk(inputs.members)
    own_shard = shards[inputs.index]
    return _ExpectedCall(
        run=lambda: inputs.comm.reduce_scatter(x, inputs.axis), expected=own_shard.clone()
    )


def _all_to_all(inputs: _Inputs) -> _ExpectedCall:
    """The piece from member i to member j has offset i n + j."""
    members = inputs.members
    first_sent = inputs.index * members
    sent = range(first_sent, first_sent + members)
    received = range(inputs.index, members * members, members)
    x = inputs.joined(sent)
    return _ExpectedCall(
        run=lambda: inputs.comm.all_to_all(x, inputs.axis), expected=inputs.joined(received)
    )


def _broadcast(inputs: _Inputs) -> _ExpectedCall:
    sent = inputs.whole(1)
    is_root = inputs.index == 0
    x = sent if is_root else torch.zeros_like(sent)
    return _ExpectedCall(run=lambda: inputs.comm.broadcast_(x, inputs.axis), expected=sent.clone())


def _gather(inputs: _Inputs) -> _ExpectedCall:
    x = inputs.own(inputs.index)
    is_root = inputs.index == 0
    members = range(inputs.members)
    expected = inputs.joined(members) if is_root else None

    def run() -> Tensor | None:
        pieces = inputs.comm.gather(x, inputs.axis)
        return None if pieces is None else torch.cat(pieces)

    return _ExpectedCall(run, expected)


def _scatter(inputs: _Inputs) -> _ExpectedCall:
    pieces = None
    is_root = inputs.index == 0
    if is_root:
        pieces = [inputs.own(member) for member in range(inputs.members)]
    own = inputs.own(inputs.index)
    out = torch.zeros_like(own)
    return _ExpectedCall(run=lambda: inputs.comm.scatter(pieces, out, inputs.axis), expected=own)


def _send_recv(inputs: _Inputs) -> _ExpectedCall:
    """Each member sends to the next one and receives from the one before it."""
    comm = inputs.comm
    x = inputs.whole(inputs.index)
    out = torch.zeros_like(x)
    before = (inputs.index - 1) % inputs.members
    behind = (inputs.index + 1) % inputs.members

    def run() -> Tensor:
        with comm.grouped_messages():
            received = comm.start_recv(out, inputs.axis, source=before)
            sent = comm.start_send(x, inputs.axis, to=behind)
        received.wait()
        sent.wait()
        return out

    return _ExpectedCall(run, expected=inputs.whole(before))


_MAKERS: dict[OperationName, Callable[[_Inputs], _ExpectedCall]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
}
