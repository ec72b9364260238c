"""Owns operations between two members: each sends once, straight to the other, and adds what comes to what it has.

Note [Two members]
    With two there is no order of summation to keep: a + b is b + a to the last bit, so both members get the same bits
    every time, whoever adds to what. Nobody needs its own piece in a buffer beside the other's, nothing is copied to
    oneself, and there is one hop. 262,144 float32 on the CPU: all_reduce 1.1 ms where gloo's own takes 1.8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.comm.flights import BackendWork, Collective, Flight
from weft.comm.reduce import fold
from weft.comm.transport import Call

if TYPE_CHECKING:
    from weft.comm.wire import Backend

MOST_BYTES = 1 << 22
"""Up to here an all_reduce goes by one swap; beyond, gloo's own halves cost the caller less."""


def all_reduce(backend: Backend, call: Call, take: Tensor) -> Flight:
    """The other's whole, added to the own in place."""
    theirs = torch.empty_like(take)
    return Collective(_swapped(backend, call, take, theirs), lambda: fold(take, theirs, call.reduce))


def all_gather(backend: Backend, call: Call, give: Tensor, take: Tensor) -> Flight:
    """Own piece into its slot, the other's into the other."""
    slots = torch.split(take, list(call.take_counts))
    put(give, slots[call.index])
    return Collective(_swapped(backend, call, give, slots[1 - call.index]))


def reduce_scatter(backend: Backend, call: Call, give: Tensor, take: Tensor) -> Flight:
    """The other's share of the own piece, to which the own share is added when it has come."""
    shares = torch.split(give, list(call.give_counts))
    own = shares[call.index]
    is_in_place = own.data_ptr() == take.data_ptr() and own.numel() > 0
    theirs = torch.empty_like(take) if is_in_place else take
    works = _swapped(backend, call, shares[1 - call.index], theirs)
    return Collective(works, lambda: fold(take, theirs if is_in_place else own, call.reduce))


def put(piece: Tensor, slot: Tensor) -> None:
    """Copy, unless it lies there already: in-place operations give a part of what they take."""
    if piece.data_ptr() != slot.data_ptr():
        slot.copy_(piece)


def _swapped(backend: Backend, call: Call, give: Tensor, take: Tensor) -> list[BackendWork]:
    """`give` to the other member, `take` from it."""
    give, take = give.view(torch.uint8), take.view(torch.uint8)
    given, taken = [0, 0], [0, 0]
    given[1 - call.index], taken[1 - call.index] = give.numel(), take.numel()
    return [backend.alltoall_base(take, give, taken, given)]
