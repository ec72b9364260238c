"""Owns what each operation puts on the wire and how its result is read off: tensors in, a flat `Call` out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from weft.comm import flat_buffers
from weft.comm.signature import brings
from weft.comm.transport import Call, Op, Reduce
from weft.errors import CommError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The ranks along an axis in mesh order, this rank's place among them, whether they compare what they bring."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    checked: bool = True

    @property
    def degree(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def call(self, op: Op, text: str, **parts: Any) -> Call:
        """A call among these members; `parts` are the other fields of `Call`."""
        return Call(op, self.axis, self.ranks, self.index, text, checked=self.checked, **parts)

    def member(self, index: int, what: str) -> int:
        """`index` once it is known to be a place in the group."""
        if not 0 <= index < self.degree:
            raise CommError(f"{what} {index} is outside axis {self.axis!r} of degree {self.degree}")
        return index


@dataclass(frozen=True, slots=True)
class Order(Generic[T]):
    """A call, or None where nobody else is concerned, and how to read off the result once it is done."""

    call: Call | None
    finish: Callable[[], T]


def all_reduce(x: Tensor, group: Group, op: Reduce) -> Order[Tensor]:
    """Sum (or other reduction) in new memory."""
    whole = x.detach().clone(memory_format=torch.contiguous_format)
    return all_reduce_(whole, group, op)


def all_reduce_(x: Tensor, group: Group, op: Reduce) -> Order[Tensor]:
    """Sum (or other reduction) in place."""
    _averages_only_floats(x, op)
    if group.degree == 1:
        return Order(None, lambda: x)
    take = flat_buffers.flatten(x)
    text = brings(f"all_reduce({op})", x.dtype, x.shape)
    return Order(group.call("all_reduce", text, take=take, reduce=op), lambda: _written(x, take))


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int] | None) -> Order[Tensor]:
    """Concatenation along `dim` of every member's x."""
    dim = _dim(x, dim)
    what = f"all_gather over {group.axis}: dim {dim}"
    lengths = (
        (x.shape[dim],) * group.degree if sizes is None else flat_buffers.member_sizes(sizes, group.degree, what=what)
    )
    if lengths[group.index] != x.shape[dim]:
        raise CommError(f"{what} is {x.shape[dim]} long here, `sizes` say {lengths[group.index]}")
    if group.degree == 1:
        return Order(None, x.detach().clone)
    take_counts = flat_buffers.piece_numels(x.shape, dim, lengths)
    give, take = flat_buffers.flatten(x), x.new_empty(sum(take_counts))
    text = brings(f"all_gather(dim {dim})", x.dtype, x.shape, free=dim)
    call = group.call(
        "all_gather", text, give=give, take=take, give_counts=(x.numel(),) * group.degree, take_counts=take_counts
    )
    shapes = [flat_buffers.with_length(x.shape, dim, length) for length in lengths]
    return Order(call, lambda: flat_buffers.unpack(take, shapes, dim))


def all_gather_(whole: Tensor, group: Group) -> Order[Tensor]:
    """Equal pieces of one line, each member's own into everybody's, in place."""
    own, counts = _own_piece(whole, group, "all_gather")
    if group.degree == 1:
        return Order(None, lambda: whole)
    text = brings("all_gather(in place)", whole.dtype, whole.shape)
    given = (own.numel(),) * group.degree
    call = group.call("all_gather", text, give=own, take=whole.detach(), give_counts=given, take_counts=counts)
    return Order(call, lambda: whole)


def reduce_scatter_(whole: Tensor, group: Group, op: Reduce) -> Order[Tensor]:
    """Equal pieces of one line, the sum (or other reduction) of everybody's own into it, in place."""
    _averages_only_floats(whole, op)
    own, counts = _own_piece(whole, group, "reduce_scatter")
    if group.degree == 1:
        return Order(None, lambda: own)
    text = brings(f"reduce_scatter({op}, in place)", whole.dtype, whole.shape)
    taken = (own.numel(),) * group.degree
    call = group.call(
        "reduce_scatter", text, give=whole.detach(), take=own, give_counts=counts, take_counts=taken, reduce=op
    )
    return Order(call, lambda: own)


def _own_piece(whole: Tensor, group: Group, what: str) -> tuple[Tensor, tuple[int, ...]]:
    if whole.dim() != 1 or not whole.is_contiguous() or whole.numel() % group.degree:
        shape = list(whole.shape)
        raise CommError(
            f"{what} in place over {group.axis} needs one contiguous line that {group.degree} divides, not {shape}"
        )
    length = whole.numel() // group.degree
    return whole.detach().narrow(0, group.index * length, length), (length,) * group.degree


def reduce_scatter(x: Tensor, group: Group, dim: int, op: Reduce, sizes: Sequence[int] | None) -> Order[Tensor]:
    """This member's piece, along `dim`, of the sum (or other reduction) of every member's x."""
    _averages_only_floats(x, op)
    dim = _dim(x, dim)
    lengths = flat_buffers.split_sizes(
        x.shape[dim], group.degree, sizes, what=f"reduce_scatter over {group.axis}: dim {dim}"
    )
    if group.degree == 1:
        return Order(None, x.detach().clone)
    give_counts = flat_buffers.piece_numels(x.shape, dim, lengths)
    own = give_counts[group.index]
    give, take = flat_buffers.pack(x, dim, lengths), x.new_empty(own)
    text = brings(f"reduce_scatter({op}, dim {dim})", x.dtype, x.shape)
    call = group.call(
        "reduce_scatter",
        text,
        give=give,
        take=take,
        give_counts=give_counts,
        take_counts=(own,) * group.degree,
        reduce=op,
    )
    shape = flat_buffers.with_length(x.shape, dim, lengths[group.index])
    return Order(call, lambda: take.view(shape))


def all_to_all(
    x: Tensor, group: Group, send_sizes: Sequence[int] | None, recv_sizes: Sequence[int] | None
) -> Order[Tensor]:
    """Along dim 0: piece j goes to member j; the result holds the pieces that came, in group order."""
    _dim(x, 0)
    what = f"all_to_all over {group.axis}: dim 0"
    sent = flat_buffers.split_sizes(x.shape[0], group.degree, send_sizes, what=what)
    taken = sent if recv_sizes is None else flat_buffers.member_sizes(recv_sizes, group.degree, what=what)
    if group.degree == 1:
        return Order(None, x.detach().clone)
    give_counts, take_counts = flat_buffers.piece_numels(x.shape, 0, sent), flat_buffers.piece_numels(x.shape, 0, taken)
    give, take = flat_buffers.flatten(x), x.new_empty(sum(take_counts))
    text = brings("all_to_all", x.dtype, x.shape, free=0)
    call = group.call("all_to_all", text, give=give, take=take, give_counts=give_counts, take_counts=take_counts)
    shape = flat_buffers.with_length(x.shape, 0, sum(taken))
    return Order(call, lambda: take.view(shape))


def broadcast_(x: Tensor, group: Group, root: int) -> Order[Tensor]:
    """x of member `root`, into every member's x."""
    group.member(root, "root")
    if group.degree == 1:
        return Order(None, lambda: x)
    take = flat_buffers.flatten(x)
    text = brings(f"broadcast(root {root})", x.dtype, x.shape)
    return Order(group.call("broadcast", text, take=take, root=root), lambda: _written(x, take))


def gather(x: Tensor, group: Group, root: int) -> Order[tuple[Tensor, ...] | None]:
    """Every member's x, at member `root`; None elsewhere."""
    group.member(root, "root")
    if group.degree == 1:
        return Order(None, lambda: (x.detach().clone(),))
    take = x.new_empty(x.numel() * group.degree) if group.index == root else None
    text = brings(f"gather(root {root})", x.dtype, x.shape)
    call = group.call("gather", text, give=flat_buffers.flatten(x), take=take, root=root)
    shape = (group.degree, *x.shape)
    return Order(call, lambda: None if take is None else take.view(shape).unbind(0))


def scatter(given: Sequence[Tensor] | None, out: Tensor, group: Group, root: int) -> Order[Tensor]:
    """Piece i of what member `root` was given, into member i's `out`."""
    group.member(root, "root")
    give = None
    if group.index == root:
        if given is None or len(given) != group.degree or any(piece.shape != out.shape for piece in given):
            raise CommError(
                f"scatter over {group.axis}: the root needs {group.degree} pieces of shape {list(out.shape)}"
            )
        give = torch.cat([piece.detach().reshape(-1) for piece in given])
        if give.dtype != out.dtype:
            raise CommError(f"scatter over {group.axis}: pieces are {give.dtype}, out is {out.dtype}")
    if group.degree == 1:
        return Order(None, lambda: out.copy_(_present(give).view(out.shape)))
    take = flat_buffers.flatten(out)
    text = brings(f"scatter(root {root})", out.dtype, out.shape)
    return Order(group.call("scatter", text, give=give, take=take, root=root), lambda: _written(out, take))


def send(x: Tensor, group: Group, to: int) -> Order[Tensor]:
    """x to member `to`; the result is x itself."""
    pair = (group.ranks[group.index], group.ranks[group.member(to, "send to")])
    _not_itself(pair, group.axis)
    call = Call(
        "send",
        group.axis,
        pair,
        0,
        brings("send", x.dtype, x.shape),
        give=flat_buffers.flatten(x),
        checked=group.checked,
    )
    return Order(call, lambda: x)


def recv(out: Tensor, group: Group, source: int) -> Order[Tensor]:
    """What member `source` sends, into `out`."""
    pair = (group.ranks[group.member(source, "receive from")], group.ranks[group.index])
    _not_itself(pair, group.axis)
    take = flat_buffers.flatten(out)
    call = Call("recv", group.axis, pair, 1, brings("recv", out.dtype, out.shape), take=take, checked=group.checked)
    return Order(call, lambda: _written(out, take))


def barrier(group: Group) -> Order[None]:
    """Nobody goes on before all have come."""
    return Order(None if group.degree == 1 else group.call("barrier", "barrier"), lambda: None)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise CommError(f"dimension {dim} is outside shape {list(x.shape)}; a scalar needs a dimension first")
    return dim % x.dim()


def _written(x: Tensor, line: Tensor) -> Tensor:
    if not x.is_contiguous():  # otherwise `line` is the memory of x
        x.detach().copy_(line.view(x.shape))
    return x


def _present(x: Tensor | None) -> Tensor:
    assert x is not None, "the only member is the root"
    return x


def _averages_only_floats(x: Tensor, op: Reduce) -> None:
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise CommError(f"avg of {x.dtype} does not stay an integer: reduce with sum and divide yourself")


def _not_itself(pair: tuple[int, int], axis: str) -> None:
    if pair[0] == pair[1]:
        raise CommError(
            f"rank {pair[0]} has no other rank to talk to along {axis!r}: source and destination are the same"
        )
