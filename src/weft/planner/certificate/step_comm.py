"""Collectives of a typed step, and its messages: activations between pipeline stages, and gradients of tied parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from weft.comm.transport import SharedResults, Work
from weft.core.dimension import activation_axes, pipeline_axis, position_axes
from weft.core.mesh import Axis, Mesh
from weft.planner.certificate.axis_types import Types
from weft.planner.certificate.declared_tensors import token_types
from weft.planner.certificate.type_mode import TypeMode
from weft.planner.certificate.typed_comm import TypedComm


class StepComm(TypedComm):
    """Collectives that also type what pipeline ranks send: activations between blocks, and their
    gradients.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        *,
        mode: TypeMode,
        shared_results: SharedResults,
        sequence_parallel: bool,
    ) -> None:
        super().__init__(mesh, rank, mode=mode, shared_results=shared_results)
        self.sequence_parallel = sequence_parallel
        self._tied: list[Types] | None = None

    def boundary_types(self, x: Tensor) -> Types:
        """The types of x_BSD between blocks, and of its gradient."""
        column_axes = position_axes()
        if self.sequence_parallel:
            column_axes = (*column_axes, *activation_axes())
        return token_types(x, self.mode.axes, column_axes=column_axes)

    @contextmanager
    def tied_gradients(self) -> Iterator[list[Types]]:
        """Messages inside are gradients of tied parameters: what arrives is like what is sent, of
        which it yields the types.
        """
        self._tied = []
        try:
            yield self._tied
        finally:
            self._tied = None

    def start_recv(self, out: Tensor, axis: Axis, *, source: int) -> Work:
        work = super().start_recv(out, axis, source=source)
        if self._tied is not None:
            self.mode.set(out, self._tied[-1])
        elif axis == pipeline_axis():
            self.mode.set(out, self.boundary_types(out))
        return work

    def start_send(self, x: Tensor, axis: Axis, *, to: int) -> Work:
        if self._tied is not None:
            self._tied.append(self.mode.types_of(x))
        elif axis == pipeline_axis():
            for name, got, need in zip(
                self.mode.axes, self.mode.types_of(x), self.boundary_types(x), strict=True
            ):
                fits = got.kind in (need.kind, "zero", "untyped")
                if not fits or (got.kind == "sharded" and got.text != need.text):
                    self.mode.report(
                        name, f"sends a tensor that is {got.text}; the next stage takes {need.text}"
                    )
        return super().start_send(x, axis, to=to)
