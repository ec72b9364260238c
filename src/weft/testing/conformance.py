"""Owns what every transport must do: checks that any rank can judge by itself, since inputs are functions of the rank.

    def conforms(comm):
        for name, check in CHECKS.items():
            for what, got, expected in check(comm):
                assert torch.equal(got.cpu(), expected), f"{name}: {what}"

Values are small whole numbers, so that every order of summation gives the same bits in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Reduce
from weft.core.dimension import all_axes
from weft.core.mesh import Axis

Finding = tuple[str, Tensor, Tensor]
"""What was tried, what came, what should have come."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MOVED_DTYPES = (*DTYPES, torch.bool, torch.uint8, torch.complex64)
SUMS: tuple[Reduce, ...] = ("sum", "avg", "max")
LARGE = 70_000
"""Elements of a tensor that transports with a way of their own for small ones treat as large."""


def brought(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rank` brings: 1, 2, -1, -2 in an order of its own."""
    generator = torch.Generator().manual_seed(rank)
    choice = torch.randint(4, shape, generator=generator)
    return torch.tensor([1, 2, -1, -2])[choice].to(dtype)


def reduced(tensors: list[Tensor], op: Reduce) -> Tensor:
    """The reduction of `tensors`, by torch's own means."""
    if op == "avg":
        return (torch.stack(tensors).sum(0) / len(tensors)).to(tensors[0].dtype)
    stacked = torch.stack(tensors)
    by_name = {"sum": stacked.sum(0), "max": stacked.amax(0), "min": stacked.amin(0), "product": stacked.prod(0)}
    return by_name[op].to(tensors[0].dtype)


def axes_of(comm: Comm) -> list[Axis]:
    """Every axis of the mesh, alone and together with others."""
    names = [name for name, degree in comm.mesh.axes if degree > 1]
    together = (itertools.combinations(names, count) for count in range(2, len(names) + 1))
    return [*names, *itertools.chain(*together)]


def all_reduces(comm: Comm) -> Iterator[Finding]:
    """Every reduction in every dtype; the argument of the functional one stays as it was."""
    for axis, dtype, op in itertools.product(axes_of(comm), DTYPES, get_args(Reduce)):
        if op == "avg" and dtype == torch.int64:
            continue
        everyone = [brought(rank, 3, 4, dtype=dtype) for rank in comm.group(axis)]
        x = brought(comm.rank, 3, 4, dtype=dtype).to(comm.device)
        yield f"all_reduce {op} {dtype} {axis}", comm.all_reduce(x, axis, op=op), reduced(everyone, op)
        yield f"argument of all_reduce {op} {axis}", x, brought(comm.rank, 3, 4, dtype=dtype)
        yield f"all_reduce_ {op} {dtype} {axis}", comm.all_reduce_(x, axis, op=op), reduced(everyone, op)


def all_reduces_of_odd_tensors(comm: Comm) -> Iterator[Finding]:
    """Scalars, empty ones, views that are not contiguous, large ones."""
    for axis in axes_of(comm):
        group = comm.group(axis)
        scalar = torch.tensor(float(comm.rank), device=comm.device)
        yield f"scalar {axis}", comm.all_reduce(scalar, axis), torch.tensor(float(sum(group)))
        yield f"empty {axis}", comm.all_reduce(torch.empty(0, 3, device=comm.device), axis), torch.empty(0, 3)
        whole = brought(comm.rank, 4, 6).to(comm.device)
        total = reduced([brought(rank, 4, 6) for rank in group], "sum")
        yield f"transposed {axis}", comm.all_reduce(whole.T, axis), total.T
        comm.all_reduce_(whole[:, ::2], axis)
        yield f"every second column {axis}", whole[:, ::2], total[:, ::2]
        yield f"columns between {axis}", whole[:, 1::2], brought(comm.rank, 4, 6)[:, 1::2]
        for op in SUMS:
            large = [brought(rank, LARGE) for rank in group]
            yield (
                f"large {op} {axis}",
                comm.all_reduce(large[comm.index(axis)].to(comm.device), axis, op=op),
                (reduced(large, op)),
            )
        if len(group) == 2:
            huge = [brought(rank, 16 * LARGE) for rank in group]
            got = comm.all_reduce(huge[comm.index(axis)].to(comm.device), axis)
            yield f"huge {axis}", got, reduced(huge, "sum")


def all_gathers(comm: Comm) -> Iterator[Finding]:
    """Along every dimension, in every dtype that can be moved, even, uneven and empty pieces."""
    for axis, dim in itertools.product(axes_of(comm), (0, 1, -1)):
        for dtype in MOVED_DTYPES:
            pieces = [brought(rank, 2, 3, 4, dtype=dtype) for rank in comm.group(axis)]
            got = comm.all_gather(pieces[comm.index(axis)].to(comm.device), axis, dim=dim)
            yield f"all_gather {dtype} dim {dim} {axis}", got, torch.cat(pieces, dim)
        for rows in (1, LARGE // 5) if comm.degree(axis) <= 3 else (1,):
            sizes = [place * rows for place in range(comm.degree(axis))]
            pieces = [
                brought(rank, size, 5).movedim(0, dim) for rank, size in zip(comm.group(axis), sizes, strict=True)
            ]
            got = comm.all_gather(pieces[comm.index(axis)].to(comm.device), axis, dim=dim, sizes=sizes)
            yield f"uneven all_gather x{rows} dim {dim} {axis}", got, torch.cat(pieces, dim)


def in_place(comm: Comm) -> Iterator[Finding]:
    """Gathered and scattered within one line; what was not asked for stays as it was."""
    for axis, length in itertools.product(axes_of(comm), (0, 3, LARGE)):
        group, index = comm.group(axis), comm.index(axis)
        own = slice(index * length, (index + 1) * length)
        for dtype in DTYPES if length < LARGE else (torch.float32,):
            wholes = [brought(rank, len(group) * length, dtype=dtype) for rank in group]
            pieces = [whole[place * length :][:length] for place, whole in enumerate(wholes)]
            line = wholes[index].to(comm.device, copy=True)
            yield f"all_gather_ {length} {dtype} {axis}", comm.all_gather_(line, axis), torch.cat(pieces)
            for op in SUMS if dtype.is_floating_point else ("sum",):
                line = wholes[index].to(comm.device, copy=True)
                expected = wholes[index].clone()
                expected[own] = reduced(wholes, op)[own]
                yield f"reduce_scatter_ {op} {length} {axis}", comm.reduce_scatter_(line, axis, op=op), expected[own]
                yield f"line of reduce_scatter_ {op} {length} {axis}", line, expected


def reduce_scatters(comm: Comm) -> Iterator[Finding]:
    """Along every dimension, every reduction, even and uneven pieces, one of them empty."""
    for axis, dim in itertools.product(axes_of(comm), (0, 1, -1)):
        degree, index = comm.degree(axis), comm.index(axis)
        even, uneven = [2] * degree, list(range(degree))
        for dtype, op in itertools.product(DTYPES, SUMS):
            if op == "avg" and dtype == torch.int64:
                continue
            wholes = [brought(rank, 2 * degree, 3, dtype=dtype).movedim(0, dim) for rank in comm.group(axis)]
            got = comm.reduce_scatter(wholes[index].to(comm.device), axis, dim=dim, op=op)
            expected = torch.split(reduced(wholes, op), even, dim)[index]
            yield f"reduce_scatter {op} {dtype} dim {dim} {axis}", got, expected
        wholes = [brought(rank, sum(uneven), 3).movedim(0, dim) for rank in comm.group(axis)]
        got = comm.reduce_scatter(wholes[index].to(comm.device), axis, dim=dim, sizes=uneven)
        yield f"uneven reduce_scatter dim {dim} {axis}", got, torch.split(reduced(wholes, "sum"), uneven, dim)[index]


def all_to_alls(comm: Comm) -> Iterator[Finding]:
    """Even pieces, and member i sending (i + j) % 3 rows to member j."""
    for axis, dtype in itertools.product(axes_of(comm), MOVED_DTYPES):
        degree, index, group = comm.degree(axis), comm.index(axis), comm.group(axis)
        wholes = [brought(rank, 2 * degree, 3, dtype=dtype) for rank in group]
        got = comm.all_to_all(wholes[index].to(comm.device), axis)
        yield f"all_to_all {dtype} {axis}", got, torch.cat([whole[2 * index : 2 * index + 2] for whole in wholes])
        rows = [[(i + j) % 3 for j in range(degree)] for i in range(degree)]
        wholes = [brought(rank, sum(row), 3, dtype=dtype) for rank, row in zip(group, rows, strict=True)]
        got = comm.all_to_all(
            wholes[index].to(comm.device), axis, send_sizes=rows[index], recv_sizes=[row[index] for row in rows]
        )
        expected = [torch.split(whole, row)[index] for whole, row in zip(wholes, rows, strict=True)]
        yield f"uneven all_to_all {dtype} {axis}", got, torch.cat(expected)


def one_to_many(comm: Comm) -> Iterator[Finding]:
    """broadcast_, gather and scatter, from and to every root."""
    for axis, dtype in itertools.product(axes_of(comm), MOVED_DTYPES):
        group, index = comm.group(axis), comm.index(axis)
        for root in range(comm.degree(axis)):
            everyone = [brought(rank, 2, 3, dtype=dtype) for rank in group]
            x = everyone[index].to(comm.device)
            gathered = comm.gather(x, axis, root=root)
            yield f"gather {root} {axis}", torch.tensor(gathered is None), torch.tensor(index != root)
            for got, expected in zip(gathered or (), everyone, strict=False):
                yield f"gather {root} {dtype} {axis}", got, expected
            pieces = [brought(100 + rank, 2, 3, dtype=dtype) for rank in group]
            given = [piece.to(comm.device) for piece in pieces] if index == root else None
            out = torch.empty_like(x)
            yield f"scatter {root} {dtype} {axis}", comm.scatter(given, out, axis, root=root), pieces[index]
            view = x.T
            comm.broadcast_(view, axis, root=root)
            yield f"broadcast_ {root} {dtype} {axis}", x, everyone[root]


def messages(comm: Comm) -> Iterator[Finding]:
    """A ring in both directions, several under way at once, empty ones among them; order is kept."""
    for axis, step in itertools.product(axes_of(comm), (1, -1)):
        degree, index = comm.degree(axis), comm.index(axis)
        to, source = (index + step) % degree, (index - step) % degree
        shapes = [(4,), (0, 2), (3, 2), (LARGE,), ()]
        outs = [torch.zeros(shape, device=comm.device) for shape in shapes]
        sends = [comm.start_send(brought(comm.rank, *shape).to(comm.device), axis, to=to) for shape in shapes]
        receives = [comm.start_recv(out, axis, source=source) for out in outs]
        for work in (*receives, *sends):
            work.wait()
            yield f"is_completed {axis}", torch.tensor(work.is_completed()), torch.tensor(True)
        for out, shape in zip(outs, shapes, strict=True):
            yield f"message {shape} {axis}", out, brought(comm.group(axis)[source], *shape)


def overlapping(comm: Comm) -> Iterator[Finding]:
    """Works of all groups under way at once, begun in another order on every other rank, waited for backwards."""
    axes = axes_of(comm)
    x = brought(comm.rank, 5).to(comm.device)
    works = {}
    for axis in axes if comm.rank % 2 else reversed(axes):
        works[axis, "sum"] = comm.start_all_reduce(x, axis)
        works[axis, "max"] = comm.start_all_reduce(x, axis, op="max")
        works[axis, "gather"] = comm.start_all_gather(x, axis)
    for (axis, what), work in reversed(works.items()):
        everyone = [brought(rank, 5) for rank in comm.group(axis)]
        expected = torch.cat(everyone) if what == "gather" else reduced(everyone, "sum" if what == "sum" else "max")
        yield f"{what} {axis}", work.wait(), expected
        yield f"{what} {axis} again", work.wait(), expected


def alone(comm: Comm) -> Iterator[Finding]:
    """Along an axis of degree 1 everything is there already, in memory of its own."""
    axis = next((name for name in all_axes() if comm.degree(name) == 1), ())
    x = brought(comm.rank, 2, 2).to(comm.device)
    works = {
        "all_reduce": comm.start_all_reduce(x, axis),
        "all_gather": comm.start_all_gather(x, axis, dim=1),
        "reduce_scatter": comm.start_reduce_scatter(x, axis),
        "all_to_all": comm.start_all_to_all(x, axis),
    }
    for what, work in works.items():
        yield what, work.wait(), brought(comm.rank, 2, 2)
        yield f"{what} is in memory of its own", torch.tensor(work.wait() is not x), torch.tensor(True)
    out = torch.zeros(2, 2, device=comm.device)
    yield "all_reduce_", comm.all_reduce_(x, axis), brought(comm.rank, 2, 2)
    yield "scatter", comm.scatter([x], out, axis), brought(comm.rank, 2, 2)
    comm.barrier(axis)


CHECKS: dict[str, Callable[[Comm], Iterator[Finding]]] = {
    check.__name__: check
    for check in (
        all_reduces,
        all_reduces_of_odd_tensors,
        all_gathers,
        reduce_scatters,
        in_place,
        all_to_alls,
        one_to_many,
        messages,
        overlapping,
        alone,
    )
}


def conform(comm: Comm, *names: str) -> int:
    """Run the checks of these names (all without any) and count what was compared.

    Raises:
        AssertionError: at the first difference.
    """
    num_compared = 0
    for name in names or CHECKS:
        for what, got, expected in CHECKS[name](comm):
            got = got.detach().cpu()
            if (got.shape, got.dtype) != (expected.shape, expected.dtype) or not torch.equal(got, expected):
                raise AssertionError(f"{name}: {what}: got {got}, expected {expected}")
            num_compared += 1
        for axis in axes_of(comm):
            comm.barrier(axis)
    return num_compared
