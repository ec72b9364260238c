"""Owns how a flat call is played on a torch.distributed backend, and how members compare what they bring."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.comm import swap
from weft.comm.flights import BackendWork, Collective, Flight, Message, Nothing, Streamed
from weft.comm.reduce import combine
from weft.comm.signature import Brought, check
from weft.comm.transport import Call, Op, Reduce

SMALL_BYTES = 1 << 18
"""Up to this many bytes taken by a rank, everybody sends straight to everybody: one hop instead of a ring."""

TEXT_BYTES = 192
DATA_TAG, SIGNATURE_TAG, ABORT_TAG = 0, 1, 2
NATIVE_REDUCE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
}  # fmt: skip


class Backend(Protocol):
    """The part of a torch.distributed backend that is used here; gloo's and NCCL's alike."""

    def allreduce(self, tensors: list[Tensor], op: Any) -> BackendWork: ...
    def alltoall_base(self, out: Tensor, x: Tensor, out_sizes: list[int], sizes: list[int]) -> BackendWork: ...
    def _allgather_base(self, out: Tensor, x: Tensor) -> BackendWork: ...
    def broadcast(self, x: Tensor, root: int) -> BackendWork: ...
    def gather(self, outs: list[Tensor], x: Tensor, root: int) -> BackendWork: ...
    def scatter(self, out: Tensor, xs: list[Tensor], root: int) -> BackendWork: ...
    def send(self, xs: list[Tensor], to: int, tag: int) -> BackendWork: ...
    def recv(self, xs: list[Tensor], source: int, tag: int) -> BackendWork: ...
    def barrier(self) -> BackendWork: ...


class Line:
    """Members of one group, connected: by gloo from the start, by another backend when tensors on its devices come.

    `connect("cpu")` makes the backend for tensors on that kind of device; it may block until all members do the same.
    """

    def __init__(self, connect: Callable[[str], Backend], reduce_ops: Mapping[Reduce, Any]) -> None:
        self.control = connect("cpu")
        self.reduce_ops = reduce_ops
        self._connect = connect
        self._backends = {"cpu": self.control}

    def backend(self, x: Tensor) -> Backend:
        """What carries tensors like `x`."""
        kind = x.device.type
        if kind not in self._backends:
            self._backends[kind] = self._connect(kind)
        return self._backends[kind]

    def abort(self, index: int) -> None:
        """Break off what is under way: gloo has no such call, but a receive that runs out closes all connections."""
        pulse = self.control.recv([torch.empty(1, dtype=torch.uint8)], 1 if index == 0 else 0, ABORT_TAG)
        with contextlib.suppress(RuntimeError):
            pulse.wait(timedelta(milliseconds=1))

    def launch(self, call: Call) -> Flight:
        """Hand `call` to the backend."""
        return _PLAY[call.op](self, call)

    def compare(self, call: Call) -> Flight:
        """Tell the other members what this rank brings, learn what they bring.

        Waiting for it raises MismatchError, naming the ranks and what each brought.
        """
        size = len(call.ranks)
        own = _encode(call)
        everyone = own.new_empty(size * own.numel())

        def judge() -> None:
            check(call.axis, call.ranks, [_decode(row, size) for row in everyone.view(size, -1)])

        if call.is_p2p:
            return Message(_swapped(self.control, call, own, everyone.view(2, -1)), judge)
        return Collective(_gathered(self.control, own, everyone, size), judge)


def _all_reduce(line: Line, call: Call) -> Flight:
    take, size = _present(call.take), len(call.ranks)
    is_native = take.dtype in NATIVE_REDUCE
    if _are_two(call, take) and (_bytes(take) <= swap.MOST_BYTES or not is_native):
        return swap.all_reduce(line.backend(take), call, take)
    if size * _bytes(take) <= SMALL_BYTES or not is_native:
        everyone = take.new_empty(size * take.numel())
        works = _gathered(line.backend(take), take, everyone, size)
        return _under_way(take, works, lambda: take.copy_(combine(everyone.chunk(size), call.reduce)))
    op = line.reduce_ops["sum" if call.reduce == "avg" else call.reduce]
    work = line.backend(take).allreduce([take], op)
    return _under_way(take, [work], (lambda: take.div_(size)) if call.reduce == "avg" else None)


def _all_gather(line: Line, call: Call) -> Flight:
    give, take, backend = _present(call.give), _present(call.take), line.backend(_present(call.take))
    if _are_two(call, take):
        return swap.all_gather(backend, call, give, take)
    if _bytes(take) <= SMALL_BYTES:
        return _all_to_all_of(line, call, give.repeat(len(call.ranks)))
    if take.is_cuda and len(set(call.take_counts)) == 1:
        return _under_way(take, [backend._allgather_base(_raw(take), _raw(give))])
    slots = torch.split(take, list(call.take_counts))  # gloo: several broadcasts are three times as fast as a gather
    swap.put(give, slots[call.index])
    return _under_way(take, [backend.broadcast(_raw(slot), root) for root, slot in enumerate(slots) if slot.numel()])


def _reduce_scatter(line: Line, call: Call) -> Flight:
    give, take, size = _present(call.give), _present(call.take), len(call.ranks)
    if _are_two(call, take):
        return swap.reduce_scatter(line.backend(take), call, give, take)
    pieces = take.new_empty(size * take.numel())
    own, given = _bytes(take), [give.element_size() * n for n in call.give_counts]
    work = line.backend(take).alltoall_base(_raw(pieces), _raw(give), [own] * size, given)
    return _under_way(take, [work], lambda: take.copy_(combine(pieces.chunk(size), call.reduce)) if own else None)


def _all_to_all(line: Line, call: Call) -> Flight:
    return _all_to_all_of(line, call, _present(call.give))


def _all_to_all_of(line: Line, call: Call, give: Tensor) -> Flight:
    width, take = give.element_size(), _present(call.take)
    taken, given = [width * n for n in call.take_counts], [width * n for n in call.give_counts]
    return _under_way(take, [line.backend(take).alltoall_base(_raw(take), _raw(give), taken, given)])


def _broadcast(line: Line, call: Call) -> Flight:
    take = _present(call.take)
    return _under_way(take, [line.backend(take).broadcast(_raw(take), call.root)])


def _gather(line: Line, call: Call) -> Flight:
    give, outs = _present(call.give), [] if call.take is None else list(_raw(call.take).chunk(len(call.ranks)))
    return _under_way(give, [line.backend(give).gather(outs, _raw(give), call.root)])


def _scatter(line: Line, call: Call) -> Flight:
    take, given = _present(call.take), [] if call.give is None else list(_raw(call.give).chunk(len(call.ranks)))
    return _under_way(take, [line.backend(take).scatter(_raw(take), given, call.root)])


def _send(line: Line, call: Call) -> Flight:
    give = _present(call.give)
    return _message(give, line.backend(give).send([_raw(give)], 1, DATA_TAG))


def _recv(line: Line, call: Call) -> Flight:
    take = _present(call.take)
    return _message(take, line.backend(take).recv([_raw(take)], 0, DATA_TAG))


def _are_two(call: Call, x: Tensor) -> bool:
    """See Note [Two members] in swap.py."""
    return len(call.ranks) == 2 and not x.is_cuda


def _under_way(x: Tensor, works: Sequence[BackendWork], finish: Callable[[], object] | None = None) -> Flight:
    return Streamed(works, finish) if x.is_cuda else Collective(works, finish)


def _message(x: Tensor, work: BackendWork) -> Flight:
    return Streamed([work]) if x.is_cuda else Message([work])


def _unless_empty(play: Callable[[Line, Call], Flight]) -> Callable[[Line, Call], Flight]:
    """For operations whose tensor is empty on every member or on none."""

    def played(line: Line, call: Call) -> Flight:
        tensor = call.give if call.give is not None else call.take
        return Nothing() if _present(tensor).numel() == 0 else play(line, call)

    return played


_PLAY: dict[Op, Callable[[Line, Call], Flight]] = {
    "all_reduce": _unless_empty(_all_reduce),
    "all_gather": _all_gather,
    "reduce_scatter": _unless_empty(_reduce_scatter),
    "all_to_all": _all_to_all,
    "broadcast": _unless_empty(_broadcast),
    "gather": _unless_empty(_gather),
    "scatter": _unless_empty(_scatter),
    "send": _unless_empty(_send),
    "recv": _unless_empty(_recv),
    "barrier": lambda line, call: Collective([line.control.barrier()]),
}


def _gathered(backend: Backend, own: Tensor, everyone: Tensor, size: int) -> list[BackendWork]:
    sizes = [_bytes(own)] * size
    return [backend.alltoall_base(_raw(everyone), _raw(own.repeat(size)), sizes, sizes)]


def _swapped(backend: Backend, call: Call, own: Tensor, rows: Tensor) -> list[BackendWork]:
    peer = 1 - call.index
    rows[call.index].copy_(own)
    return [backend.recv([rows[peer]], peer, SIGNATURE_TAG), backend.send([own], peer, SIGNATURE_TAG)]


def _encode(call: Call) -> Tensor:
    size, text = len(call.ranks), call.brings.encode()[:TEXT_BYTES]
    counts = [*(call.give_counts or (-1,) * size), *(call.take_counts or (-1,) * size)]
    return torch.frombuffer(bytearray(struct.pack(f"{TEXT_BYTES}s{2 * size}q", text, *counts)), dtype=torch.uint8)


def _decode(row: Tensor, size: int) -> Brought:
    text, *counts = struct.unpack(f"{TEXT_BYTES}s{2 * size}q", bytes(row.tolist()))
    known = tuple(counts) if counts[0] >= 0 else ()
    return Brought(text.rstrip(b"\0").decode(errors="replace"), known[:size], known[size:])


def _present(x: Tensor | None) -> Tensor:
    assert x is not None, "the order gave this call its tensors"
    return x


def _raw(line: Tensor) -> Tensor:
    return line.view(torch.uint8)


def _bytes(line: Tensor) -> int:
    return line.numel() * line.element_size()
