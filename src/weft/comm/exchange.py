"""Owns what an operation comes to when every member's call is at hand: reads the gives, fills the takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.reduce import combine
from weft.comm.transport import Call, Op


def exchange(calls: Sequence[Call]) -> None:
    """Play one operation; `calls` stand in group order and are known to fit together.

    Tensors may live on different devices: pieces move to the one that takes them. Reductions go in group order. What
    counts the memory or the work of the rank that came last is not told of what it does here for all.
    """
    is_watched = torch._C._len_torch_dispatch_stack() > 0  # asked first: to disable nothing takes 25 us
    with torch.no_grad(), _disable_current_modes() if is_watched else nullcontext():
        _PLAY[calls[0].op](calls)


def _all_reduce(calls: Sequence[Call]) -> None:
    whole = combine([_take(call) for call in calls], calls[0].reduce)
    for call in calls:
        _take(call).copy_(whole)


def _all_gather(calls: Sequence[Call]) -> None:
    whole = _joined([_give(call) for call in calls], calls[0])
    for call in calls:
        _take(call).copy_(whole)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    cut = [torch.split(_give(call), list(call.give_counts)) for call in calls]
    for call in calls:
        _take(call).copy_(combine([pieces[call.index] for pieces in cut], call.reduce))


def _all_to_all(calls: Sequence[Call]) -> None:
    cut = [torch.split(_give(call), list(call.give_counts)) for call in calls]
    for call in calls:
        _take(call).copy_(_joined([pieces[call.index] for pieces in cut], call))


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for call in calls:
        if call is not root:
            _take(call).copy_(_take(root))


def _gather(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    _take(root).copy_(_joined([_give(call) for call in calls], root))


def _scatter(calls: Sequence[Call]) -> None:
    wholes = _give(calls[calls[0].root]).chunk(len(calls)) if _take(calls[0]).numel() else ()
    for call, whole in zip(calls, wholes, strict=False):
        _take(call).copy_(whole)


def _message(calls: Sequence[Call]) -> None:
    source, destination = calls
    _take(destination).copy_(_give(source))


def _barrier(calls: Sequence[Call]) -> None:
    pass


_PLAY: dict[Op, Callable[[Sequence[Call]], None]] = {
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


def _joined(pieces: Sequence[Tensor], call: Call) -> Tensor:
    device = _take(call).device
    return torch.cat([piece.to(device) for piece in pieces])


def _give(call: Call) -> Tensor:
    assert call.give is not None, f"{call.op} gives nothing"
    return call.give


def _take(call: Call) -> Tensor:
    assert call.take is not None, f"{call.op} takes nothing"
    return call.take
