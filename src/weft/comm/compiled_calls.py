"""Collectives in compiled code: operators that torch.compile keeps whole and in order, each of which calls a `Comm`.

Note [Collectives in compiled code]
    Where torch.compile traces a block, `Comm.all_reduce` and its like are these operators: torch knows the
    shape of their result and nothing else. When the compiled code runs, an operator calls the same method
    of the `Comm`, so each call is counted, profiled and watched as in a block that is not compiled.

    The compiler cannot change their order. They are declared to have effects that are ordered (torch's
    `EffectType.ORDERED`): each takes a token that the one before it has returned, in the forward as in the
    backward. So none is moved before another, left out, merged with an equal one, or run again in the
    backward in place of saving its result, whatever the sizes of a rank's shards or its memory. Ranks that
    trace the same forward make the same calls.

    Which `Comm` an operator calls is the value of a tensor, its `handle`, and no constant of the compiled
    code: ranks that are threads of one process have one code, and a backward may run on a thread of autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._library.effects import EffectType

from weft.comm.collectives import split_sizes, with_length
from weft.comm.group import Group
from weft.comm.transport import Reduce
from weft.core.mesh import Axis

_comms: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The `Comm` objects of this process that are alive, whose module imports this one: operators of torch are
those of a process, too.
"""


def handle_of(comm: Any) -> Tensor:
    """What operators find a `Comm` by, for as long as it is alive."""
    number = id(comm)
    _comms[number] = comm
    return torch.tensor(number, device="cpu")


def _comm(handle: Tensor) -> Any:
    return _comms[int(handle.item())]


def _axis(text: str) -> Axis:
    """The axis of a group's name."""
    names = tuple(text.split("+"))
    return names if len(names) > 1 else text


@torch.library.custom_op("weft::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, handle: Tensor, axis: str, op: str) -> Tensor:
    result: Tensor = _comm(handle).all_reduce(x, _axis(axis), op=op)
    return result


@_all_reduce.register_fake
def _(x: Tensor, handle: Tensor, axis: str, op: str) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("weft::all_gather", mutates_args=())
def _all_gather(x: Tensor, handle: Tensor, axis: str, dim: int, sizes: Sequence[int]) -> Tensor:
    result: Tensor = _comm(handle).all_gather(x, _axis(axis), dim=dim, sizes=sizes)
    return result


@_all_gather.register_fake
def _(x: Tensor, handle: Tensor, axis: str, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.new_empty(with_length(x.shape, dim, sum(sizes)))


@torch.library.custom_op("weft::reduce_scatter", mutates_args=())
def _reduce_scatter(
    x: Tensor, handle: Tensor, axis: str, dim: int, op: str, sizes: Sequence[int], own: int
) -> Tensor:
    comm = _comm(handle)
    result: Tensor = comm.reduce_scatter(x, _axis(axis), dim=dim, op=op, sizes=sizes)
    return result


@_reduce_scatter.register_fake
def _(
    x: Tensor, handle: Tensor, axis: str, dim: int, op: str, sizes: Sequence[int], own: int
) -> Tensor:
    return x.new_empty(with_length(x.shape, dim, own))


@torch.library.custom_op("weft::all_to_all", mutates_args=())
def _all_to_all(
    x: Tensor, handle: Tensor, axis: str, send_sizes: Sequence[int], recv_sizes: Sequence[int]
) -> Tensor:
    result: Tensor = _comm(handle).all_to_all(
        x, _axis(axis), send_sizes=send_sizes, recv_sizes=recv_sizes
    )
    return result


@_all_to_all.register_fake
def _(
    x: Tensor, handle: Tensor, axis: str, send_sizes: Sequence[int], recv_sizes: Sequence[int]
) -> Tensor:
    return x.new_empty(with_length(x.shape, 0, sum(recv_sizes)))


for operator in (_all_reduce, _all_gather, _reduce_scatter, _all_to_all):
    operator.register_effect(EffectType.ORDERED)


def all_reduce(x: Tensor, handle: Tensor, group: Group, op: Reduce) -> Tensor:
    """The reduction of every member's x."""
    result: Tensor = _all_reduce(x, handle, group.axis, op)
    return result


def all_gather(
    x: Tensor, handle: Tensor, group: Group, dim: int, sizes: Sequence[int] | None
) -> Tensor:
    """Every member's x, concatenated along `dim`."""
    lengths = sizes or [x.shape[dim]] * group.degree
    result: Tensor = _all_gather(x, handle, group.axis, dim % x.dim(), list(lengths))
    return result


def reduce_scatter(
    x: Tensor, handle: Tensor, group: Group, dim: int, op: Reduce, sizes: Sequence[int] | None
) -> Tensor:
    """This member's piece, along `dim`, of the reduction of every member's x."""
    lengths = list(split_sizes(x.shape[dim], group.degree, sizes, what="reduce_scatter"))
    own = lengths[0] if len(set(lengths)) == 1 else lengths[group.index]
    result: Tensor = _reduce_scatter(x, handle, group.axis, dim % x.dim(), op, lengths, own)
    return result


def all_to_all(
    x: Tensor,
    handle: Tensor,
    group: Group,
    send_sizes: Sequence[int] | None,
    recv_sizes: Sequence[int] | None,
) -> Tensor:
    """Along dim 0: piece j goes to member j; the received pieces in group order."""
    sent = list(split_sizes(x.shape[0], group.degree, send_sizes, what="all_to_all"))
    result: Tensor = _all_to_all(x, handle, group.axis, sent, list(recv_sizes or sent))
    return result
