"""Conformance suite for transports: each rank checks the result of every collective, since inputs are functions of the rank.

    def conforms(comm):
        for name, check in CHECKS.items():
            for what, got, expected in check(comm):
                assert torch.equal(got.cpu(), expected), f"{name}: {what}"

Values are small integers, so that every order of summation gives the same bits in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Reduce, Work
from weft.core.dimension import all_axes
from weft.core.mesh import Axis

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MOVED_DTYPES = (*DTYPES, torch.bool, torch.uint8, torch.complex64)
SUMS: tuple[Reduce, ...] = ("sum", "avg", "max")
LARGE = 70_000
"""Elements of a tensor that is too large for a transport's fast path for small ones."""


class Comparison(NamedTuple):
    """One result and its expected value, on the CPU."""

    what: str
    got: Tensor
    expected: Tensor


@dataclass(frozen=True)
class GroupInputs:
    """The group of this rank along an axis, and inputs for all its members."""

    comm: Comm
    axis: Axis

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.comm.group(self.axis)

    @property
    def size(self) -> int:
        return self.comm.degree(self.axis)

    @property
    def index(self) -> int:
        return self.comm.index(self.axis)

    def inputs(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """One input for each member, on the CPU."""
        return [make_input(rank, *shape, dtype=dtype) for rank in self.ranks]

    def local(self, tensors: list[Tensor]) -> Tensor:
        """This rank's tensor of one for each member, as a copy on its device."""
        return tensors[self.index].to(self.comm.device, copy=True)

    def compare(self, what: str, got: Tensor, expected: Tensor) -> Comparison:
        """A comparison whose text names the axis, too."""
        return Comparison(f"{what} {self.axis}", got, expected)


def make_input(
    rank: int,
    *shape: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The input of `rank`: values 1, 2, -1, -2 drawn with the rank as seed."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randint(4, shape, generator=generator)
    values = torch.tensor([1, 2, -1, -2])
    return values[indices].to(dtype)


def reduce(tensors: list[Tensor], op: Reduce) -> Tensor:
    """The reduction of `tensors` in torch."""
    dtype = tensors[0].dtype
    stacked = torch.stack(tensors)
    match op:
        case "sum":
            return stacked.sum(0).to(dtype)
        case "avg":
            total = stacked.sum(0)
            mean = total / len(tensors)
            return mean.to(dtype)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case "product":
            return stacked.prod(0).to(dtype)


def groups_of(comm: Comm) -> Iterator[GroupInputs]:
    """The groups of every axis of the mesh, alone and combined with others."""
    names = [name for name, degree in comm.mesh.axes if degree > 1]
    for name in names:
        yield GroupInputs(comm, name)
    for count in range(2, len(names) + 1):
        for combined in itertools.combinations(names, count):
            yield GroupInputs(comm, combined)


def supports(op: Reduce, dtype: torch.dtype) -> bool:
    """An average needs a floating-point dtype."""
    return op != "avg" or dtype.is_floating_point


def all_reduces(comm: Comm) -> Iterator[Comparison]:
    """Every reduction in every dtype; the functional one leaves its input unchanged."""
    ops: tuple[Reduce, ...] = get_args(Reduce)
    for group, dtype, op in itertools.product(groups_of(comm), DTYPES, ops):
        if not supports(op, dtype):
            continue
        inputs = group.inputs(3, 4, dtype=dtype)
        expected = reduce(inputs, op)
        x = group.local(inputs)
        got = comm.all_reduce(x, group.axis, op=op)
        yield group.compare(f"all_reduce {op} {dtype}", got, expected)
        yield group.compare(
            f"input of all_reduce {op} {dtype}",
            x,
            inputs[group.index],
        )
        got = comm.all_reduce_(x, group.axis, op=op)
        yield group.compare(f"all_reduce_ {op} {dtype}", got, expected)


def all_reduces_of_odd_tensors(comm: Comm) -> Iterator[Comparison]:
    """Scalars, empty tensors, non-contiguous views, large tensors."""
    for group in groups_of(comm):
        yield from _small_all_reduces(group)
        yield from _all_reduces_of_views(group)
        yield from _large_all_reduces(group)


def _small_all_reduces(group: GroupInputs) -> Iterator[Comparison]:
    comm, axis = group.comm, group.axis
    scalar = torch.tensor(float(comm.rank), device=comm.device)
    total = float(sum(group.ranks))
    yield group.compare(
        "scalar",
        comm.all_reduce(scalar, axis),
        torch.tensor(total),
    )
    empty = torch.empty(0, 3)
    yield group.compare(
        "empty",
        comm.all_reduce(empty.to(comm.device), axis),
        empty,
    )


def _all_reduces_of_views(group: GroupInputs) -> Iterator[Comparison]:
    comm, axis = group.comm, group.axis
    inputs = group.inputs(4, 6)
    total = reduce(inputs, "sum")
    x = group.local(inputs)
    transposed = comm.all_reduce(x.T, axis)
    yield group.compare("transposed", transposed, total.T)
    even_columns = slice(0, None, 2)
    comm.all_reduce_(x[:, even_columns], axis)
    expected = inputs[group.index].clone()
    expected[:, even_columns] = total[:, even_columns]
    yield group.compare("even columns", x, expected)


def _large_all_reduces(group: GroupInputs) -> Iterator[Comparison]:
    comm, axis = group.comm, group.axis
    inputs = group.inputs(LARGE)
    for op in SUMS:
        x = group.local(inputs)
        got = comm.all_reduce(x, axis, op=op)
        expected = reduce(inputs, op)
        yield group.compare(f"large {op}", got, expected)
    if group.size == 2:
        inputs = group.inputs(16 * LARGE)
        x = group.local(inputs)
        got = comm.all_reduce(x, axis)
        expected = reduce(inputs, "sum")
        yield group.compare("very large", got, expected)


def all_gathers(comm: Comm) -> Iterator[Comparison]:
    """Along every dimension, in every dtype that can be moved, with even, uneven and empty shards."""
    for group, dim in itertools.product(groups_of(comm), (0, 1, -1)):
        for dtype in MOVED_DTYPES:
            shards = group.inputs(2, 3, 4, dtype=dtype)
            local = group.local(shards)
            got = comm.all_gather(local, group.axis, dim=dim)
            yield group.compare(
                f"all_gather {dtype} dim {dim}",
                got,
                torch.cat(shards, dim),
            )
        yield _uneven_all_gather(group, dim, rows=1)
        if group.size <= 3:
            yield _uneven_all_gather(group, dim, rows=LARGE // 5)


def _uneven_all_gather(group: GroupInputs, dim: int, *, rows: int) -> Comparison:
    """Member i has i * `rows` rows."""
    shards: list[Tensor] = []
    sizes: list[int] = []
    for index, rank in enumerate(group.ranks):
        size = index * rows
        shard = make_input(rank, size, 5).movedim(0, dim)
        sizes.append(size)
        shards.append(shard)
    got = group.comm.all_gather(
        group.local(shards),
        group.axis,
        dim=dim,
        sizes=sizes,
    )
    return group.compare(
        f"uneven all_gather x{rows} dim {dim}",
        got,
        torch.cat(shards, dim),
    )


def in_place(comm: Comm) -> Iterator[Comparison]:
    """All-gather and reduce-scatter within a flat buffer; the other parts of the buffer stay
    unchanged.
    """
    for group, length in itertools.product(groups_of(comm), (0, 3, LARGE)):
        dtypes = DTYPES if length < LARGE else (torch.float32,)
        for dtype in dtypes:
            buffers = group.inputs(group.size * length, dtype=dtype)
            yield _gather_in_place(group, buffers, length)
            ops = SUMS if dtype.is_floating_point else SUMS[:1]
            for op in ops:
                yield from _reduce_scatter_in_place(group, buffers, length, op=op)


def _gather_in_place(
    group: GroupInputs,
    buffers: list[Tensor],
    length: int,
) -> Comparison:
    shards: list[Tensor] = []
    for index, member_buffer in enumerate(buffers):
        shard = member_buffer.narrow(0, index * length, length)
        shards.append(shard)
    buffer = group.local(buffers)
    got = group.comm.all_gather_(buffer, group.axis)
    return group.compare(
        f"all_gather_ {length} {buffer.dtype}",
        got,
        torch.cat(shards),
    )


def _reduce_scatter_in_place(
    group: GroupInputs,
    buffers: list[Tensor],
    length: int,
    *,
    op: Reduce,
) -> Iterator[Comparison]:
    start = group.index * length
    own = slice(start, start + length)
    expected = buffers[group.index].clone()
    reduced = reduce(buffers, op)
    expected[own] = reduced[own]
    buffer = group.local(buffers)
    name = f"reduce_scatter_ {op} {length} {group.axis}"
    yield Comparison(
        name,
        group.comm.reduce_scatter_(buffer, group.axis, op=op),
        expected[own],
    )
    yield Comparison(f"buffer of {name}", buffer, expected)


def reduce_scatters(comm: Comm) -> Iterator[Comparison]:
    """Along every dimension, with every reduction, even and uneven shards, one of them empty."""
    for group, dim in itertools.product(groups_of(comm), (0, 1, -1)):
        for dtype, op in itertools.product(DTYPES, SUMS):
            if supports(op, dtype):
                yield _even_reduce_scatter(group, dim, dtype=dtype, op=op)
        yield _uneven_reduce_scatter(group, dim)


def _even_reduce_scatter(
    group: GroupInputs,
    dim: int,
    *,
    dtype: torch.dtype,
    op: Reduce,
) -> Comparison:
    drawn = group.inputs(2 * group.size, 3, dtype=dtype)
    inputs = [x.movedim(0, dim) for x in drawn]
    got = group.comm.reduce_scatter(
        group.local(inputs),
        group.axis,
        dim=dim,
        op=op,
    )
    shards = reduce(inputs, op).split(2, dim)
    return group.compare(
        f"reduce_scatter {op} {dtype} dim {dim}",
        got,
        shards[group.index],
    )


def _uneven_reduce_scatter(group: GroupInputs, dim: int) -> Comparison:
    """Member i gets i rows."""
    sizes = list(range(group.size))
    drawn = group.inputs(sum(sizes), 3)
    inputs = [x.movedim(0, dim) for x in drawn]
    got = group.comm.reduce_scatter(
        group.local(inputs),
        group.axis,
        dim=dim,
        sizes=sizes,
    )
    total = reduce(inputs, "sum")
    shards = total.split(sizes, dim)
    return group.compare(
        f"uneven reduce_scatter dim {dim}",
        got,
        shards[group.index],
    )


def all_to_alls(comm: Comm) -> Iterator[Comparison]:
    """Even shards, and member i sending (i + j) % 3 rows to member j."""
    for group, dtype in itertools.product(groups_of(comm), MOVED_DTYPES):
        yield _even_all_to_all(group, dtype)
        yield _uneven_all_to_all(group, dtype)


def _even_all_to_all(group: GroupInputs, dtype: torch.dtype) -> Comparison:
    inputs = group.inputs(2 * group.size, 3, dtype=dtype)
    x = group.local(inputs)
    got = group.comm.all_to_all(x, group.axis)
    first_row = 2 * group.index
    received = [x.narrow(0, first_row, 2) for x in inputs]
    return group.compare(
        f"all_to_all {dtype}",
        got,
        torch.cat(received),
    )


def _uneven_all_to_all(group: GroupInputs, dtype: torch.dtype) -> Comparison:
    rows: list[list[int]] = []
    inputs: list[Tensor] = []
    for index, rank in enumerate(group.ranks):
        send_sizes = [(index + receiver) % 3 for receiver in range(group.size)]
        rows.append(send_sizes)
        inputs.append(make_input(rank, sum(send_sizes), 3, dtype=dtype))
    got = group.comm.all_to_all(
        group.local(inputs),
        group.axis,
        send_sizes=rows[group.index],
        recv_sizes=[send_sizes[group.index] for send_sizes in rows],
    )
    received: list[Tensor] = []
    for x, send_sizes in zip(inputs, rows, strict=True):
        received.append(torch.split(x, send_sizes)[group.index])
    return group.compare(
        f"uneven all_to_all {dtype}",
        got,
        torch.cat(received),
    )


def one_to_many(comm: Comm) -> Iterator[Comparison]:
    """broadcast_, gather and scatter, from and to every root."""
    for group, dtype in itertools.product(groups_of(comm), MOVED_DTYPES):
        for root in range(group.size):
            yield from _gather(group, dtype, root)
            yield _scatter(group, dtype, root)
            yield _broadcast(group, dtype, root)


def _gather(group: GroupInputs, dtype: torch.dtype, root: int) -> Iterator[Comparison]:
    inputs = group.inputs(2, 3, dtype=dtype)
    gathered = group.comm.gather(group.local(inputs), group.axis, root=root)
    is_none = torch.tensor(gathered is None)
    yield Comparison(
        f"gather {root} {group.axis} returns None",
        is_none,
        torch.tensor(group.index != root),
    )
    if gathered is not None:
        for got, expected in zip(gathered, inputs, strict=True):
            yield group.compare(f"gather {root} {dtype}", got, expected)


def _scatter(group: GroupInputs, dtype: torch.dtype, root: int) -> Comparison:
    comm = group.comm
    shards = [make_input(100 + rank, 2, 3, dtype=dtype) for rank in group.ranks]
    sent = [shard.to(comm.device) for shard in shards] if group.index == root else None
    out = torch.empty(2, 3, dtype=dtype, device=comm.device)
    got = comm.scatter(sent, out, group.axis, root=root)
    return group.compare(
        f"scatter {root} {dtype}",
        got,
        shards[group.index],
    )


def _broadcast(group: GroupInputs, dtype: torch.dtype, root: int) -> Comparison:
    """Of a non-contiguous view."""
    inputs = group.inputs(2, 3, dtype=dtype)
    x = group.local(inputs)
    group.comm.broadcast_(x.T, group.axis, root=root)
    return group.compare(f"broadcast_ {root} {dtype}", x, inputs[root])


def messages(comm: Comm) -> Iterator[Comparison]:
    """Point-to-point in a ring in both directions, several in flight, empty ones among them; order
    is kept.
    """
    for group, step in itertools.product(groups_of(comm), (1, -1)):
        yield from _ring(group, step)


def _ring(group: GroupInputs, step: int) -> Iterator[Comparison]:
    comm, axis = group.comm, group.axis
    to = (group.index + step) % group.size
    source = (group.index - step) % group.size
    shapes = [(4,), (0, 2), (3, 2), (LARGE,), ()]
    outs = [torch.zeros(shape, device=comm.device) for shape in shapes]
    sends: list[Work] = []
    for shape in shapes:
        x = make_input(comm.rank, *shape).to(comm.device)
        sends.append(comm.start_send(x, axis, to=to))
    receives = [comm.start_recv(out, axis, source=source) for out in outs]
    for work in (*receives, *sends):
        work.wait()
        yield group.compare(
            "is_completed",
            torch.tensor(work.is_completed()),
            torch.tensor(True),
        )
    sender = group.ranks[source]
    for out, shape in zip(outs, shapes, strict=True):
        expected = make_input(sender, *shape)
        yield group.compare(f"message {shape}", out, expected)


def overlapping(comm: Comm) -> Iterator[Comparison]:
    """Works of all groups in flight, started in another order on every other rank, waited for in
    reverse.
    """
    x = make_input(comm.rank, 5).to(comm.device)
    groups = list(groups_of(comm))
    if comm.rank % 2 == 0:
        groups.reverse()
    works: list[tuple[str, Work, Tensor]] = []
    for group in groups:
        axis = group.axis
        inputs = group.inputs(5)
        total = comm.start_all_reduce(x, axis)
        largest = comm.start_all_reduce(x, axis, op="max")
        gathered = comm.start_all_gather(x, axis)
        works += [
            (f"sum {axis}", total, reduce(inputs, "sum")),
            (f"max {axis}", largest, reduce(inputs, "max")),
            (f"gather {axis}", gathered, torch.cat(inputs)),
        ]
    for what, work, expected in reversed(works):
        yield Comparison(what, work.wait(), expected)
        yield Comparison(f"{what} again", work.wait(), expected)


def single_member(comm: Comm) -> Iterator[Comparison]:
    """Along an axis of size 1 a collective returns a copy of its input."""
    sizes_one = [name for name in all_axes() if comm.degree(name) == 1]
    axis: Axis = sizes_one[0] if sizes_one else ()
    expected = make_input(comm.rank, 2, 2)
    x = expected.to(comm.device)
    works = {
        "all_reduce": comm.start_all_reduce(x, axis),
        "all_gather": comm.start_all_gather(x, axis, dim=1),
        "reduce_scatter": comm.start_reduce_scatter(x, axis),
        "all_to_all": comm.start_all_to_all(x, axis),
    }
    for what, work in works.items():
        got = work.wait()
        yield Comparison(what, got, expected)
        yield Comparison(
            f"{what} is in memory of its own",
            torch.tensor(got is not x),
            torch.tensor(True),
        )
    out = torch.zeros(2, 2, device=comm.device)
    got = comm.all_reduce_(x, axis)
    yield Comparison("all_reduce_", got, expected)
    got = comm.scatter([x], out, axis)
    yield Comparison("scatter", got, expected)
    comm.barrier(axis)


Check = Callable[[Comm], Iterator[Comparison]]

CHECKS: dict[str, Check] = {
    "all_reduces": all_reduces,
    "all_reduces_of_odd_tensors": all_reduces_of_odd_tensors,
    "all_gathers": all_gathers,
    "reduce_scatters": reduce_scatters,
    "in_place": in_place,
    "all_to_alls": all_to_alls,
    "one_to_many": one_to_many,
    "messages": messages,
    "overlapping": overlapping,
    "single_member": single_member,
}


def conform(comm: Comm, *names: str) -> int:
    """Run the checks of these names (without names: all) and return the number of comparisons.

    Raises:
        AssertionError: at the first difference.
    """
    num_compared = 0
    for name in names or CHECKS:
        for comparison in CHECKS[name](comm):
            _assert_equal(name, comparison)
            num_compared += 1
        for group in groups_of(comm):
            comm.barrier(group.axis)
    return num_compared


def _assert_equal(name: str, comparison: Comparison) -> None:
    got = comparison.got.detach().cpu()
    expected = comparison.expected
    has_same_shape = got.shape == expected.shape
    has_same_dtype = got.dtype == expected.dtype
    if not (has_same_shape and has_same_dtype and torch.equal(got, expected)):
        raise AssertionError(f"{name}: {comparison.what}: got {got}, expected {expected}")
