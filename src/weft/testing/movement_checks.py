"""Checks of the collectives that move entries unchanged: all-gather, all-to-all, gather, scatter, broadcast, messages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Work
from weft.testing.comparison import (
    DIMS,
    LARGE,
    MOVED_DTYPES,
    GroupInputs,
    ResultCheck,
    groups_of,
    is_true,
    make_input,
)

MESSAGE_SHAPES: tuple[tuple[int, ...], ...] = ((4,), (0, 2), (3, 2), (LARGE,), ())


def all_gathers(comm: Comm) -> Iterator[ResultCheck]:
    """Along every dimension, in every dtype that can be moved, with even, uneven and empty shards."""
    for group in groups_of(comm):
        for dim in DIMS:
            for dtype in MOVED_DTYPES:
                yield _even_all_gather(group, dim, dtype)
            yield _uneven_all_gather(group, dim, rows=1)
            if group.size <= 3:
                yield _uneven_all_gather(group, dim, rows=LARGE // 5)


def _even_all_gather(group: GroupInputs, dim: int, dtype: torch.dtype) -> ResultCheck:
    shards = group.inputs(2, 3, 4, dtype=dtype)
    local = group.local(shards)
    got = group.comm.all_gather(local, group.axis, dim=dim)
    return group.compare(f"all_gather {dtype} dim {dim}", got, torch.cat(shards, dim))


def _uneven_all_gather(group: GroupInputs, dim: int, *, rows: int) -> ResultCheck:
    """Member i has i * `rows` rows."""
    shards: list[Tensor] = []
    sizes: list[int] = []
    for index, rank in enumerate(group.ranks):
        size = index * rows
        shard = make_input(rank, size, 5).movedim(0, dim)
        sizes.append(size)
        shards.append(shard)
    got = group.comm.all_gather(group.local(shards), group.axis, dim=dim, sizes=sizes)
    return group.compare(f"uneven all_gather x{rows} dim {dim}", got, torch.cat(shards, dim))


def all_to_alls(comm: Comm) -> Iterator[ResultCheck]:
    """Even shards, and member i sending (i + j) % 3 rows to member j."""
    for group in groups_of(comm):
        for dtype in MOVED_DTYPES:
            yield _even_all_to_all(group, dtype)
            yield _uneven_all_to_all(group, dtype)


def _even_all_to_all(group: GroupInputs, dtype: torch.dtype) -> ResultCheck:
    inputs = group.inputs(2 * group.size, 3, dtype=dtype)
    x = group.local(inputs)
    got = group.comm.all_to_all(x, group.axis)
    first_row = 2 * group.index
    received = [x.narrow(0, first_row, 2) for x in inputs]
    return group.compare(f"all_to_all {dtype}", got, torch.cat(received))


def _uneven_all_to_all(group: GroupInputs, dtype: torch.dtype) -> ResultCheck:
    own = group.index
    inputs: list[Tensor] = []
    send_sizes: list[list[int]] = []
    recv_sizes: list[int] = []
    received: list[Tensor] = []
    for sender, rank in enumerate(group.ranks):
        sizes = [(sender + receiver) % 3 for receiver in range(group.size)]
        x = make_input(rank, sum(sizes), 3, dtype=dtype)
        parts = x.split(sizes)
        inputs.append(x)
        send_sizes.append(sizes)
        recv_sizes.append(sizes[own])
        received.append(parts[own])
    got = group.comm.all_to_all(
        group.local(inputs), group.axis, send_sizes=send_sizes[own], recv_sizes=recv_sizes
    )
    return group.compare(f"uneven all_to_all {dtype}", got, torch.cat(received))


def one_to_many(comm: Comm) -> Iterator[ResultCheck]:
    """broadcast_, gather and scatter, from and to every root."""
    for group in groups_of(comm):
        for dtype in MOVED_DTYPES:
            for root in range(group.size):
                yield from _gather(group, dtype, root)
                yield _scatter(group, dtype, root)
                yield _broadcast(group, dtype, root)


def _gather(group: GroupInputs, dtype: torch.dtype, root: int) -> Iterator[ResultCheck]:
    inputs = group.inputs(2, 3, dtype=dtype)
    x = group.local(inputs)
    gathered = group.comm.gather(x, group.axis, root=root)
    is_root = group.index == root
    is_given = gathered is not None
    yield is_true(f"gather {root} {group.axis} returns None on others", is_given == is_root)
    if gathered is not None:
        for got, expected in zip(gathered, inputs, strict=True):
            yield group.compare(f"gather {root} {dtype}", got, expected)


def _scatter(group: GroupInputs, dtype: torch.dtype, root: int) -> ResultCheck:
    comm = group.comm
    shards: list[Tensor] = []
    for rank in group.ranks:
        shard = make_input(100 + rank, 2, 3, dtype=dtype)
        shards.append(shard)
    sent: list[Tensor] | None = None
    if group.index == root:
        sent = [shard.to(comm.device) for shard in shards]
    out = torch.empty(2, 3, dtype=dtype, device=comm.device)
    got = comm.scatter(sent, out, group.axis, root=root)
    return group.compare(f"scatter {root} {dtype}", got, shards[group.index])


def _broadcast(group: GroupInputs, dtype: torch.dtype, root: int) -> ResultCheck:
    """Check broadcasts of a non-contiguous view."""
    inputs = group.inputs(2, 3, dtype=dtype)
    x = group.local(inputs)
    group.comm.broadcast_(x.T, group.axis, root=root)
    return group.compare(f"broadcast_ {root} {dtype}", x, inputs[root])


def messages(comm: Comm) -> Iterator[ResultCheck]:
    """Point-to-point in a ring in both directions, several in flight, empty ones among them; order
    is kept.
    """
    for group in groups_of(comm):
        for step in (1, -1):
            yield from _ring(group, step)


def _ring(group: GroupInputs, step: int) -> Iterator[ResultCheck]:
    comm = group.comm
    target = (group.index + step) % group.size
    source = (group.index - step) % group.size
    sends: list[Work] = []
    for shape in MESSAGE_SHAPES:
        x = make_input(comm.rank, *shape).to(comm.device)
        send = comm.start_send(x, group.axis, to=target)
        sends.append(send)
    outs: list[Tensor] = []
    receives: list[Work] = []
    for shape in MESSAGE_SHAPES:
        out = torch.zeros(shape, device=comm.device)
        receive = comm.start_recv(out, group.axis, source=source)
        receives.append(receive)
        outs.append(out)
    for work in (*receives, *sends):
        work.wait()
        yield is_true(f"is_completed {group.axis}", work.is_completed())
    sender = group.ranks[source]
    for out, shape in zip(outs, MESSAGE_SHAPES, strict=True):
        expected = make_input(sender, *shape)
        yield group.compare(f"message {shape}", out, expected)
