"""Owns `Comm`: every operation between ranks, by mesh-axis name. One object per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from weft.comm import orders
from weft.comm.observe import Observer, Operation, operation
from weft.comm.orders import Group, Order
from weft.comm.transport import Call, Pending, Reduce, Transport, Work
from weft.core.mesh import AXES, Axis, Mesh, axis_names
from weft.errors import CommError, Fault, MeshError, did_you_mean

T = TypeVar("T")


class Comm:
    """A rank's way to the others: `comm.all_reduce(x, "tp")`, `comm.all_gather(x, ("dp", "cp"), dim=1)`.

    An axis is the name of a mesh axis or a tuple of names, taken together as one group in mesh order. An axis of
    degree 1 returns at once: no transport, nothing counted. Functional operations return new memory, those that end in
    `_` work in place and return their argument. Every operation has a `start_` twin that returns a `Work`; the tensors
    it was given are not to be touched until that was waited for. Autograd sees nothing of these: `comm/ops.py` has
    differentiable ones.

    Attributes:
        checked: whether members first compare what they bring, where that costs messages (processes). On at first; it
            may be switched off, on every rank at the same point.
    """

    def __init__(self, mesh: Mesh, rank: int, transport: Transport, *, observers: tuple[Observer, ...] = ()) -> None:
        if (rank, mesh.size) != (transport.rank, transport.size):
            here, there = (
                f"rank {rank} of mesh {mesh} ({mesh.size} ranks)",
                f"rank {transport.rank} of {transport.size}",
            )
            raise CommError(f"{here} was given the transport of {there}")
        self.mesh, self.rank, self.transport, self.observers = mesh, rank, transport, observers
        self.device = transport.device
        self.checked = True
        self._groups: dict[tuple[Axis, bool], Group] = {}

    def degree(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return self._group(axis).degree

    def index(self, axis: Axis) -> int:
        """This rank's place along `axis`."""
        return self._group(axis).index

    def group(self, axis: Axis) -> tuple[int, ...]:
        """World ranks along `axis`, in mesh order."""
        return self._group(axis).ranks

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Without comparing first, inside the block; every rank must enter it at the same point."""
        before, self.checked = self.checked, False
        try:
            yield
        finally:
            self.checked = before

    def all_reduce(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Tensor:
        """The reduction of every member's x, in new memory."""
        return self.start_all_reduce(x, axis, op=op).wait()

    def start_all_reduce(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._start(orders.all_reduce(x, self._group(axis), op))

    def all_reduce_(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Tensor:
        """The reduction of every member's x, written into x."""
        return self.start_all_reduce_(x, axis, op=op).wait()

    def start_all_reduce_(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._start(orders.all_reduce_(x, self._group(axis), op))

    def all_gather(self, x: Tensor, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Every member's x, joined along `dim`; `sizes` are the members' lengths along `dim` where they differ."""
        return self.start_all_gather(x, axis, dim=dim, sizes=sizes).wait()

    def start_all_gather(self, x: Tensor, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None) -> Work:
        return self._start(orders.all_gather(x, self._group(axis), dim, sizes))

    def all_gather_(self, whole: Tensor, axis: Axis) -> Tensor:
        """`whole` is one line of equal pieces, of which this member has its own: every other one is written into it."""
        return self.start_all_gather_(whole, axis).wait()

    def start_all_gather_(self, whole: Tensor, axis: Axis) -> Work:
        return self._start(orders.all_gather_(whole, self._group(axis)))

    def reduce_scatter(
        self, x: Tensor, axis: Axis, *, dim: int = 0, op: Reduce = "sum", sizes: Sequence[int] | None = None
    ) -> Tensor:
        """This member's piece along `dim` of the reduction of every member's x; `sizes` are the pieces' lengths."""
        return self.start_reduce_scatter(x, axis, dim=dim, op=op, sizes=sizes).wait()

    def start_reduce_scatter(
        self, x: Tensor, axis: Axis, *, dim: int = 0, op: Reduce = "sum", sizes: Sequence[int] | None = None
    ) -> Work:
        return self._start(orders.reduce_scatter(x, self._group(axis), dim, op, sizes))

    def reduce_scatter_(self, whole: Tensor, axis: Axis, *, op: Reduce = "sum") -> Tensor:
        """`whole` is one line of equal pieces: the reduction of every member's is written into this member's own.

        Returns that piece, a view; the others stay as they were.
        """
        return self.start_reduce_scatter_(whole, axis, op=op).wait()

    def start_reduce_scatter_(self, whole: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._start(orders.reduce_scatter_(whole, self._group(axis), op))

    def all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Piece j of x along dim 0 to member j; the pieces that came, joined in group order. Without sizes: even."""
        return self.start_all_to_all(x, axis, send_sizes=send_sizes, recv_sizes=recv_sizes).wait()

    def start_all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
    ) -> Work:
        return self._start(orders.all_to_all(x, self._group(axis), send_sizes, recv_sizes))

    def broadcast_(self, x: Tensor, axis: Axis, *, root: int = 0) -> Tensor:
        """x of member `root` (a place along the axis), written into every member's x."""
        return self.start_broadcast_(x, axis, root=root).wait()

    def start_broadcast_(self, x: Tensor, axis: Axis, *, root: int = 0) -> Work:
        return self._start(orders.broadcast_(x, self._group(axis), root))

    def gather(self, x: Tensor, axis: Axis, *, root: int = 0) -> tuple[Tensor, ...] | None:
        """Every member's x, in group order, at member `root`; None elsewhere."""
        return self.start_gather(x, axis, root=root).wait()

    def start_gather(self, x: Tensor, axis: Axis, *, root: int = 0) -> Work[tuple[Tensor, ...] | None]:
        return self._start(orders.gather(x, self._group(axis), root))

    def scatter(self, pieces: Sequence[Tensor] | None, out: Tensor, axis: Axis, *, root: int = 0) -> Tensor:
        """Piece i of member `root`'s `pieces` (None elsewhere), written into member i's `out`."""
        return self.start_scatter(pieces, out, axis, root=root).wait()

    def start_scatter(self, pieces: Sequence[Tensor] | None, out: Tensor, axis: Axis, *, root: int = 0) -> Work:
        return self._start(orders.scatter(pieces, out, self._group(axis), root))

    def send(self, x: Tensor, axis: Axis, *, to: int) -> None:
        """x to member `to` (a place along the axis); returns when it was received."""
        self.start_send(x, axis, to=to).wait()

    def start_send(self, x: Tensor, axis: Axis, *, to: int) -> Work:
        return self._start(orders.send(x, self._group(axis), to))

    def recv(self, out: Tensor, axis: Axis, *, source: int) -> Tensor:
        """What member `source` sends, written into `out`."""
        return self.start_recv(out, axis, source=source).wait()

    def start_recv(self, out: Tensor, axis: Axis, *, source: int) -> Work:
        return self._start(orders.recv(out, self._group(axis), source))

    def barrier(self, axis: Axis) -> None:
        """Return when every member has come."""
        self.start_barrier(axis).wait()

    def start_barrier(self, axis: Axis) -> Work[None]:
        return self._start(orders.barrier(self._group(axis)))

    def _group(self, axis: Axis) -> Group:
        group = self._groups.get((axis, self.checked))
        if group is None:
            group = self._groups[axis, self.checked] = _find_group(self.mesh, self.rank, axis, checked=self.checked)
        return group

    def _start(self, order: Order[T]) -> Work[T]:
        call = order.call
        if call is None:
            return Work.done(order.finish())
        record = operation(call) if self.observers else None
        if record is not None:
            for observer in self.observers:
                observer.started(record)
        return Work(_Watched(self.transport.start(call), self, call, record), order.finish)


@dataclass(slots=True)
class _Watched:
    """A pending operation whose end is told to the observers and whose failure says where on the mesh it happened."""

    pending: Pending
    comm: Comm
    call: Call
    record: Operation | None

    def wait(self) -> None:
        try:
            self.pending.wait()
        except CommError as error:
            mesh = self.comm.mesh
            members = ", ".join(f"{rank} = {mesh.coord_text(rank)}" for rank in self.call.ranks[:16])
            error.add_note(
                f"seen by rank {self.comm.rank} ({mesh.coord_text(self.comm.rank)}) of mesh {mesh}; ranks: {members}"
            )
            raise
        if self.record is not None:
            for observer in self.comm.observers:
                observer.finished(self.record)

    def is_completed(self) -> bool:
        return self.pending.is_completed()


def _find_group(mesh: Mesh, rank: int, axis: Axis, *, checked: bool) -> Group:
    for name in axis_names(axis):
        if name not in AXES:
            raise MeshError(Fault("axis", f"unknown axis {name!r}", fix=did_you_mean(name, AXES)))
    cut = tuple(name for name, degree in mesh.axes if name in axis_names(axis) and degree > 1)
    text = "+".join(cut) or "+".join(axis_names(axis))
    return Group(text, mesh.group(rank, cut), mesh.index(rank, cut), checked)
