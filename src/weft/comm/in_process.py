"""In-process collectives: every member's inputs are copied to the outputs; reductions are computed in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm.reductions import reduce_in_order
from weft.comm.transport import Call, Op

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
