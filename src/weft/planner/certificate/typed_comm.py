"""Collectives with types: what each takes and gives along its axis, from the calls that really reach the transport.

call              takes            gives
all_reduce(sum)   partial          replicated
all_reduce(max)   varying          replicated
reduce_scatter    partial          sharded in its dim
all_gather        sharded in dim   replicated           of a replicated tensor its copies: replicated
all_to_all        varying          varying              inside of declared regions
broadcast         any              replicated
send, recv        inside of declared regions; along the pipeline see `typed_step`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from weft.comm.comm import Comm
from weft.comm.transport import Call, OnLate, Reduce, SharedMetaTransport, SharedResults, Work
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Axis, Mesh
from weft.parallel.tensor.dims import (
    DimFactor,
    Dims,
    is_sharded,
    length,
    whole_dim,
    whole_dims,
    with_dim,
)
from weft.planner.certificate.axis_types import (
    UNTYPED,
    VARYING,
    AxisType,
    Types,
    of_dims,
    replicated,
)
from weft.planner.certificate.tensor_types import TypedPiece
from weft.planner.certificate.type_mode import TypeMode


class CallTransport(SharedMetaTransport):
    """A transport without other ranks that lists its calls."""

    def __init__(self, size: int, rank: int, *, shared_results: SharedResults) -> None:
        super().__init__(size, rank, shared_results=shared_results)
        self.calls: list[Call] = []
        self.num_started = 0

    def start(self, call: Call, on_late: OnLate) -> None:
        """Append the call to the list."""
        self.calls.append(call)
        self.num_started += 1


class TypedComm(Comm):
    """Collectives of one rank on the meta device that type their results.

    Args:
        mode: types the operations between them.
        shared_results: of all ranks that are typed.
    """

    def __init__(
        self, mesh: Mesh, rank: int, *, mode: TypeMode, shared_results: SharedResults
    ) -> None:
        self.calls = CallTransport(mesh.size, rank, shared_results=shared_results)
        super().__init__(mesh, rank, self.calls)
        self.mode = mode

    def start_all_reduce(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._typed(
            x,
            lambda: super(TypedComm, self).start_all_reduce(x, axis, op=op),
            lambda calls, out: self._note_reduced(calls, x, out),
        )

    def start_all_reduce_(self, x: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        return self._typed(
            x,
            lambda: super(TypedComm, self).start_all_reduce_(x, axis, op=op),
            lambda calls, out: self._note_reduced(calls, x, out),
        )

    def start_all_gather(
        self, x: Tensor, axis: Axis, *, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> Work:
        def note(calls: Sequence[Call], out: Tensor) -> None:
            self._set(out, self._gathered(calls, x, out, dim, _names(axis)))

        return self._typed(
            x, lambda: super(TypedComm, self).start_all_gather(x, axis, dim=dim, sizes=sizes), note
        )

    def start_all_gather_(self, buffer: Tensor, axis: Axis) -> Work:
        return self._typed(
            buffer,
            lambda: super(TypedComm, self).start_all_gather_(buffer, axis),
            lambda calls, out: None,  # parameters are declared
        )

    def start_reduce_scatter(
        self,
        x: Tensor,
        axis: Axis,
        *,
        dim: int = 0,
        op: Reduce = "sum",
        sizes: Sequence[int] | None = None,
        communicator: Any = "group",
    ) -> Work:
        def note(calls: Sequence[Call], out: Tensor) -> None:
            if self.mode.tensors.is_mixed(x):
                start = self.index(axis) * out.numel()
                self._note_flat_shard(calls, x, out, start, axis)
                return
            self._set(out, self._scattered(calls, x, out, dim, _names(axis)))

        return self._typed(
            x,
            lambda: super(TypedComm, self).start_reduce_scatter(
                x, axis, dim=dim, op=op, sizes=sizes, communicator=communicator
            ),
            note,
        )

    def start_reduce_scatter_(self, buffer: Tensor, axis: Axis, *, op: Reduce = "sum") -> Work:
        def note(calls: Sequence[Call], out: Tensor) -> None:
            start = self.index(axis) * out.numel()
            self._note_flat_shard(calls, buffer, out, start, axis)

        return self._typed(
            buffer, lambda: super(TypedComm, self).start_reduce_scatter_(buffer, axis, op=op), note
        )

    def start_all_to_all(
        self,
        x: Tensor,
        axis: Axis,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
    ) -> Work:
        def note(calls: Sequence[Call], out: Tensor) -> None:
            self._set(out, self._along(x, out, _names(axis), lambda _: VARYING))

        return self._typed(
            x,
            lambda: super(TypedComm, self).start_all_to_all(
                x, axis, send_sizes=send_sizes, recv_sizes=recv_sizes
            ),
            note,
        )

    def start_broadcast_(self, x: Tensor, axis: Axis, *, root: int = 0) -> Work:
        def note(calls: Sequence[Call], out: Tensor) -> None:
            shape = tuple(out.shape)
            self._set(out, self._along(x, out, _names(axis), lambda _: replicated(shape)))

        return self._typed(
            x, lambda: super(TypedComm, self).start_broadcast_(x, axis, root=root), note
        )

    def start_recv(self, out: Tensor, axis: Axis, *, source: int) -> Work:
        def note(calls: Sequence[Call], received: Tensor) -> None:
            if axis != pipeline_axis():
                types = self._along(out, out, _names(axis), lambda _: VARYING)
                self._set(received, types)

        return self._typed(
            out, lambda: super(TypedComm, self).start_recv(out, axis, source=source), note
        )

    def start_send(self, x: Tensor, axis: Axis, *, to: int) -> Work:
        return self._typed(
            x, lambda: super(TypedComm, self).start_send(x, axis, to=to), lambda calls, out: None
        )

    def combine_world(self, row: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        with self.mode.paused():
            out = super().combine_world(row, combine)
        shape = tuple(out.shape)
        return self.mode.set(out, (replicated(shape),) * len(self.mode.axes))

    def _typed(
        self, x: Tensor, start: Callable[[], Work], note: Callable[[Sequence[Call], Tensor], None]
    ) -> Work:
        """A started operation whose result is typed when it is waited for."""
        if self.mode.is_paused:
            return start()
        before = len(self.calls.calls)
        with self.mode.paused():
            work = start()
        calls = tuple(self.calls.calls[before:])
        del self.calls.calls[before:]
        if len(calls) > 1:
            for name in set(_names_of(calls[0])) & set(self.mode.axes):
                self.mode.report(name, f"{calls[0].op} runs {len(calls)} times on its own result")

        def finish() -> Tensor:
            with self.mode.paused():
                out = work.wait()
                note(calls, out)
            return out

        return Work(None, finish)

    def _set(self, out: Tensor, types: Types) -> None:
        self.mode.tensors.write(out, types)

    def summed_pieces(
        self, pieces: Sequence[TypedPiece], axes: Sequence[str], *, is_shard: bool
    ) -> list[TypedPiece]:
        """Entries of a flat buffer after a sum over some axes, of which each rank has its shard or
        the whole.
        """
        found = []
        for piece in pieces:
            types = list(piece.types)
            for name in axes:
                if name in self.mode.axes:
                    place = self.mode.axes.index(name)
                    self._check_summand("sum", name, types[place])
                    types[place] = VARYING if is_shard else replicated((piece.numel,))
            found.append(TypedPiece(piece.start, piece.stop, tuple(types)))
        return found

    def _note_reduced(self, calls: Sequence[Call], x: Tensor, out: Tensor) -> None:
        """The result of an all-reduce."""
        if self.mode.tensors.is_mixed(x):
            pieces = self.mode.tensors.pieces(x)
            reduced = [
                TypedPiece(one.start, one.stop, self._reduced(calls, one.types, (one.numel,)))
                for one in pieces
            ]
            self.mode.tensors.set_pieces(out, reduced)
            return
        self._set(out, self._reduced(calls, self.mode.types_of(x), tuple(out.shape)))

    def _reduced(self, calls: Sequence[Call], types: Types, shape: tuple[int, ...]) -> Types:
        found = list(types)
        for call in calls:
            for name in _names_of(call):
                if name in self.mode.axes:
                    place = self.mode.axes.index(name)
                    self._check_summand(call.reduce, name, found[place])
                    found[place] = replicated(shape)
        return tuple(found)

    def _check_summand(self, reduce: str, name: str, one: AxisType) -> None:
        """Report what cannot be summed over an axis."""
        if reduce not in ("sum", "avg"):
            return
        if one.kind == "replicated":
            self.mode.report(
                name, f"the {reduce} of a replicated tensor counts it once for each rank"
            )
        elif one.kind == "sharded":
            self.mode.report(name, f"the {reduce} over ranks adds different entries ({one.text})")
        elif reduce == "avg" and one.kind == "partial":
            self.mode.report(name, "the avg of a partial sum divides it by the number of ranks")

    def _note_flat_shard(
        self, calls: Sequence[Call], x: Tensor, out: Tensor, start: int, axis: Axis
    ) -> None:
        """This rank's shard of a flat buffer of gradients, reduced."""
        pieces = self.mode.tensors.pieces(x)
        for call in calls:
            if call.reduce == "avg":
                for piece in pieces:
                    for name in set(_names_of(call)) & set(self.mode.axes):
                        self._check_summand("avg", name, piece.types[self.mode.axes.index(name)])
            pieces = self.summed_pieces(pieces, _names_of(call), is_shard=True)
        self.mode.tensors.set_pieces(out, own_pieces(pieces, start, start + out.numel()))

    def _gathered(
        self, calls: Sequence[Call], x: Tensor, out: Tensor, dim: int, names: tuple[str, ...]
    ) -> Types:
        """Types of the shards of all ranks, one after the other."""
        called = {name for call in calls for name in _names_of(call)}

        def gathered(one: AxisType) -> AxisType:
            if one.kind == "partial":
                return UNTYPED
            if one.kind == "sharded" and is_sharded(one.dims[dim % x.dim()]):
                return replicated(tuple(out.shape))
            if one.kind == "sharded":
                return UNTYPED
            return replicated(tuple(out.shape))

        for name in set(names) & set(self.mode.axes):
            one = self.mode.type_of(x, name)
            if one.kind == "partial" or (
                one.kind == "sharded" and not is_sharded(one.dims[dim % x.dim()])
            ):
                self.mode.report(name, f"all_gather along dim {dim} of a tensor that is {one.text}")
        if not called:
            return self._along(x, out, names, lambda one: VARYING)
        return self._along(x, out, names, gathered, resized=dim % x.dim())

    def _scattered(
        self, calls: Sequence[Call], x: Tensor, out: Tensor, dim: int, names: tuple[str, ...]
    ) -> Types:
        place = dim % x.dim()

        def scattered(_: AxisType) -> AxisType:
            dims = with_dim(
                whole_dims(out.shape), place, (DimFactor(out.shape[place], sharded=True),)
            )
            return of_dims(dims)

        types = self.mode.types_of(x)
        for call in calls:
            for name in _names_of(call):
                if name in self.mode.axes:
                    self._check_summand(call.reduce, name, types[self.mode.axes.index(name)])
        if not calls:
            return self._along(x, out, names, lambda _: VARYING)
        return self._along(x, out, names, scattered, resized=place)

    def _along(
        self,
        x: Tensor,
        out: Tensor,
        names: tuple[str, ...],
        change: Callable[[AxisType], AxisType],
        *,
        resized: int | None = None,
    ) -> Types:
        """The types of x with those along some axes changed, and the dims of `out`."""
        found = []
        for name, one in zip(self.mode.axes, self.mode.types_of(x), strict=True):
            found.append(change(one) if name in names else _with_shape(one, x, out, resized))
        return tuple(found)


def own_pieces(pieces: Sequence[TypedPiece], start: int, stop: int) -> list[TypedPiece]:
    """The pieces of entries `start` to `stop`, counted from there."""
    found = []
    for piece in pieces:
        first, last = max(piece.start, start), min(piece.stop, stop)
        if first < last:
            found.append(TypedPiece(first - start, last - start, piece.types))
    return found


def _with_shape(one: AxisType, x: Tensor, out: Tensor, resized: int | None) -> AxisType:
    """The type along another axis, of a result of another shape."""
    shape = tuple(out.shape)
    if one.kind == "replicated":
        return replicated(shape)
    if one.kind != "sharded":
        return one
    if len(one.dims) != len(shape):
        return VARYING
    dims: Dims = one.dims
    if len(dims) == 1 and length(dims[0]) != shape[0]:  # rows in a flat buffer, now more or fewer
        rows, *entries = dims[0]
        num_rows = shape[0] // max(length(tuple(entries)), 1)
        return of_dims(((replace(rows, size=num_rows), *entries),))
    if resized is not None:
        before = dims[resized]
        new = (
            (DimFactor(shape[resized], sharded=True),)
            if is_sharded(before)
            else whole_dim(shape[resized])
        )
        dims = with_dim(dims, resized, new)
    return of_dims(dims)


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _names_of(call: Call) -> tuple[str, ...]:
    return tuple(call.axis.split("+"))
