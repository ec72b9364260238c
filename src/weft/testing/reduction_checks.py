"""Checks of the collectives that add or otherwise reduce: all-reduce and reduce-scatter, and both within a flat buffer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Reduce
from weft.testing.comparison import (
    DIMS,
    DTYPES,
    LARGE,
    SUMS,
    GroupInputs,
    ResultCheck,
    groups_of,
    reduce,
    supports,
)


def all_reduces(comm: Comm) -> Iterator[ResultCheck]:
    """Every reduction in every dtype; the functional one leaves its input unchanged."""
    ops: tuple[Reduce, ...] = get_args(Reduce)
    for group in groups_of(comm):
        for dtype in DTYPES:
            for op in ops:
                if supports(op, dtype):
                    yield from _all_reduce(group, dtype, op)


def _all_reduce(group: GroupInputs, dtype: torch.dtype, op: Reduce) -> Iterator[ResultCheck]:
    comm = group.comm
    inputs = group.inputs(3, 4, dtype=dtype)
    own_input = inputs[group.index]
    expected = reduce(inputs, op)
    x = group.local(inputs)
    got = comm.all_reduce(x, group.axis, op=op)
    yield group.compare(f"all_reduce {op} {dtype}", got, expected)
    yield group.compare(f"input of all_reduce {op} {dtype}", x, own_input)
    got = comm.all_reduce_(x, group.axis, op=op)
    yield group.compare(f"all_reduce_ {op} {dtype}", got, expected)


def all_reduces_of_odd_tensors(comm: Comm) -> Iterator[ResultCheck]:
    """Scalars, empty tensors, non-contiguous views, large tensors."""
    for group in groups_of(comm):
        yield from _small_all_reduces(group)
        yield from _all_reduces_of_views(group)
        yield from _large_all_reduces(group)


def _small_all_reduces(group: GroupInputs) -> Iterator[ResultCheck]:
    comm = group.comm
    scalar = torch.tensor(float(comm.rank), device=comm.device)
    total = float(sum(group.ranks))
    yield group.compare("scalar", comm.all_reduce(scalar, group.axis), torch.tensor(total))
    empty = torch.empty(0, 3, device=comm.device)
    yield group.compare("empty", comm.all_reduce(empty, group.axis), torch.empty(0, 3))


def _all_reduces_of_views(group: GroupInputs) -> Iterator[ResultCheck]:
    comm = group.comm
    inputs = group.inputs(4, 6)
    total = reduce(inputs, "sum")
    x = group.local(inputs)
    transposed = comm.all_reduce(x.T, group.axis)
    yield group.compare("transposed", transposed, total.T)
    even_columns = slice(0, None, 2)
    comm.all_reduce_(x[:, even_columns], group.axis)
    expected = inputs[group.index].clone()
    expected[:, even_columns] = total[:, even_columns]
    yield group.compare("even columns", x, expected)


def _large_all_reduces(group: GroupInputs) -> Iterator[ResultCheck]:
    comm = group.comm
    inputs = group.inputs(LARGE)
    for op in SUMS:
        x = group.local(inputs)
        got = comm.all_reduce(x, group.axis, op=op)
        expected = reduce(inputs, op)
        yield group.compare(f"large {op}", got, expected)
    if group.size == 2:
        inputs = group.inputs(16 * LARGE)
        x = group.local(inputs)
        got = comm.all_reduce(x, group.axis)
        expected = reduce(inputs, "sum")
        yield group.compare("very large", got, expected)


def reduce_scatters(comm: Comm) -> Iterator[ResultCheck]:
    """Along every dimension, with every reduction, even and uneven shards, one of them empty."""
    for group in groups_of(comm):
        for dim in DIMS:
            for dtype in DTYPES:
                for op in SUMS:
                    if supports(op, dtype):
                        yield _even_reduce_scatter(group, dim, dtype=dtype, op=op)
            yield _uneven_reduce_scatter(group, dim)


def _even_reduce_scatter(
    group: GroupInputs, dim: int, *, dtype: torch.dtype, op: Reduce
) -> ResultCheck:
    drawn = group.inputs(2 * group.size, 3, dtype=dtype)
    inputs = [x.movedim(0, dim) for x in drawn]
    got = group.comm.reduce_scatter(group.local(inputs), group.axis, dim=dim, op=op)
    shards = reduce(inputs, op).split(2, dim)
    return group.compare(f"reduce_scatter {op} {dtype} dim {dim}", got, shards[group.index])


def _uneven_reduce_scatter(group: GroupInputs, dim: int) -> ResultCheck:
    """Member i gets i rows."""
    sizes = list(range(group.size))
    drawn = group.inputs(sum(sizes), 3)
    inputs = [x.movedim(0, dim) for x in drawn]
    got = group.comm.reduce_scatter(group.local(inputs), group.axis, dim=dim, sizes=sizes)
    total = reduce(inputs, "sum")
    shards = total.split(sizes, dim)
    return group.compare(f"uneven reduce_scatter dim {dim}", got, shards[group.index])


def in_place(comm: Comm) -> Iterator[ResultCheck]:
    """All-gather and reduce-scatter within a flat buffer; the other parts of the buffer stay
    unchanged.
    """
    for group in groups_of(comm):
        for dtype in DTYPES:
            yield from _in_place(group, dtype, 0)
            yield from _in_place(group, dtype, 3)
        yield from _in_place(group, torch.float32, LARGE)


def _in_place(group: GroupInputs, dtype: torch.dtype, length: int) -> Iterator[ResultCheck]:
    buffers = group.inputs(group.size * length, dtype=dtype)
    yield _gather_in_place(group, buffers, length)
    for op in SUMS:
        if op == "sum" or dtype.is_floating_point:
            yield from _reduce_scatter_in_place(group, buffers, length, op=op)


def _gather_in_place(group: GroupInputs, buffers: list[Tensor], length: int) -> ResultCheck:
    shards: list[Tensor] = []
    for index, member_buffer in enumerate(buffers):
        start = index * length
        shard = member_buffer.narrow(0, start, length)
        shards.append(shard)
    buffer = group.local(buffers)
    got = group.comm.all_gather_(buffer, group.axis)
    return group.compare(f"all_gather_ {length} {buffer.dtype}", got, torch.cat(shards))


def _reduce_scatter_in_place(
    group: GroupInputs, buffers: list[Tensor], length: int, *, op: Reduce
) -> Iterator[ResultCheck]:
    start = group.index * length
    own = slice(start, start + length)
    expected = buffers[group.index].clone()
    reduced = reduce(buffers, op)
    expected[own] = reduced[own]
    buffer = group.local(buffers)
    got = group.comm.reduce_scatter_(buffer, group.axis, op=op)
    name = f"reduce_scatter_ {op} {length}"
    yield group.compare(name, got, expected[own])
    yield group.compare(f"buffer of {name}", buffer, expected)
