"""Functions of a step whose results depend on the rank's place: totals, tied gradients, orders of experts' tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.axes import StateAxes
from weft.core.dimension import pipeline_axis, replicated_axes
from weft.core.mesh import Axis
from weft.models.common import experts
from weft.models.common.experts import Sorting
from weft.parallel.context import whole_sequences
from weft.parallel.ep import AXIS as EP
from weft.parallel.expert import dispatch
from weft.parallel.model import group_statistics
from weft.parallel.tensor import chunked_products
from weft.parallel.tensor.dims import DimFactor, is_sharded, whole_dims, with_dim
from weft.parallel.zero import grad_norm, param_group, quantized_group
from weft.planner.certificate.axis_types import (
    PARTIAL,
    UNTYPED,
    VARYING,
    AxisType,
    of_dims,
    replicated,
)
from weft.planner.certificate.declared_regions import declared
from weft.planner.certificate.step_comm import StepComm
from weft.planner.certificate.tensor_types import TypedPiece
from weft.planner.certificate.type_mode import TypeMode
from weft.planner.certificate.typed_comm import own_pieces
from weft.train import step as step_module
from weft.train.step import TrainStep
from weft.train.step_stats import RankStats


class WatchedFunctions:
    """Functions of a step whose results depend on the rank's place: what they take is checked, what
    they give is declared.
    """

    def __init__(self, step: TrainStep, comm: StepComm, mode: TypeMode) -> None:
        self.step = step
        self.comm = comm
        self.mode = mode

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it is open, these functions are watched."""
        changes: Mapping[tuple[Any, str], Callable[..., Any]] = {
            (step_module, "total_stats"): self._total_stats,
            (grad_norm, "squared_norm"): self._squared_norm,
            (grad_norm, "exact_squared_norm"): self._squared_norm,
            (grad_norm, "sum_tied_gradients"): self._sum_tied_gradients,
            (experts, "sort_by_expert"): self._sort_by_expert,
            (dispatch, "sort_by_expert"): self._sort_by_expert,
            (dispatch, "_by_expert"): self._by_expert,
            (step_module, "exact_sum"): self._exact_sum,
            (step_module, "rank_sums"): self._rank_sums,
            (param_group, "FixedOrderSum"): self._fixed_order_sum,
            (ops, "scatter_to_region"): self._scatter_to_region,
            (chunked_products, "gathered_products"): _gathered_products,
            (chunked_products, "scattered_product"): _scattered_product,
            (whole_sequences, "share_gradient"): functools.partial(self._gradient_share, PARTIAL),
            (whole_sequences, "join_gradient"): functools.partial(self._gradient_share, None),
            (quantized_group, "dequantize_into"): self._dequantize_into,
            (group_statistics, "group_batch_norm"): self._group_batch_norm,
        }
        before = {}
        for (module, name), change in changes.items():
            original = getattr(module, name)
            before[module, name] = original
            setattr(module, name, functools.partial(change, original))
        try:
            yield
        finally:
            for (module, name), original in before.items():
                setattr(module, name, original)

    def _total_stats(
        self, original: Callable[..., Any], comm: Any, local: RankStats, targets: Tensor
    ) -> Any:
        if not self.step.fixed_order:
            self._check_loss(local.loss)
        with self.mode.paused():
            return original(comm, local, targets)

    def _exact_sum(
        self, original: Callable[..., Tensor], comm: Any, losses: Sequence[Tensor]
    ) -> Tensor:
        """The losses of all ranks, the same bits everywhere."""
        for loss in losses:
            self._check_loss(loss)
        with self.mode.paused():
            return original(comm, losses)

    def _rank_sums(
        self, original: Callable[..., Tensor], comm: Any, found: Sequence[Tensor], **options: bool
    ) -> Tensor:
        """A rank's part of the sums of rewards, which are made where the loss is."""
        with self.mode.paused():
            return original(comm, found, **options)

    def _fixed_order_sum(
        self,
        original: Callable[..., Any],
        comm: Any,
        flat: Tensor,
        axes: tuple[str, ...],
        replicate_axes: tuple[str, ...],
        **options: Any,
    ) -> _DeclaredSum:
        """The sum over ranks in a tree, as an all-to-all and additions."""
        pieces = self.mode.tensors.pieces(flat)
        with self.mode.paused():
            started = original(comm, flat, axes, replicate_axes, **options)
        return _DeclaredSum(started, pieces, self.comm, StateAxes(axes, replicate_axes))

    def _squared_norm(self, original: Callable[..., Tensor], *args: Any) -> Tensor:
        self._check_norm()
        with self.mode.paused():
            return original(*args)

    def _sum_tied_gradients(self, original: Callable[..., None], *args: Any) -> None:
        """Every tied gradient is sent to the other ranks that hold it."""
        ties = self.step.model.cross_stage_ties
        shared = [tie.name for tie in ties if tie.name in self.step.grads.sharded_params]
        with self.comm.tied_gradients() as sent:
            original(*args)
        if len(sent) < len(shared):
            what = "gradients of tied parameters are not summed over the stages that hold them"
            self.mode.report(pipeline_axis(), what, where=shared[0])

    def _sort_by_expert(
        self, original: Callable[..., Sorting], experts_NK: Tensor, num_experts: int
    ) -> Sorting:
        """Orders of this rank's own slots, and counts of them."""
        with self.mode.paused():
            sorting = original(experts_NK, num_experts)
        places = self.mode.types_of(experts_NK)
        self.mode.set(sorting.places, places)
        slots, counts = [], []
        for one in places:
            if one.kind == "sharded":
                slots.append(of_dims(((DimFactor(len(sorting.slots), sharded=True),),)))
                counts.append(PARTIAL)
            else:
                slots.append(_reshaped(one, sorting.slots))
                counts.append(_reshaped(one, sorting.counts))
        self.mode.set(sorting.slots, tuple(slots))
        self.mode.set(sorting.counts, tuple(counts))
        return sorting

    def _by_expert(
        self, original: Callable[..., Sorting], counts_RE: Tensor, *, num_rows: int
    ) -> Sorting:
        """Orders of the rows that this rank has received over ep."""
        with self.mode.paused():
            sorting = original(counts_RE, num_rows=num_rows)
        counts = self.mode.types_of(counts_RE)
        for x in (sorting.slots, sorting.places, sorting.counts):
            types = []
            for axis, one in zip(self.mode.axes, counts, strict=True):
                types.append(VARYING if axis == EP else _rows_of(one, x, num_rows))
            self.mode.set(x, tuple(types))
        return sorting

    def _scatter_to_region(
        self,
        original: Callable[..., Tensor],
        x: Tensor,
        comm: Any,
        axis: str,
        dim: int,
        **sizes: Any,
    ) -> Tensor:
        """This rank's part, along `dim`, of what all ranks have."""
        types = self.mode.types_of(x)
        with self.mode.paused():
            out = original(x, comm, axis, dim, **sizes)
        found = []
        for name, one in zip(self.mode.axes, types, strict=True):
            if name == axis and not one.is_same_everywhere:
                self.mode.report(axis, f"takes a part of a tensor that is {one.text}")
            dims = one.dims if one.kind == "sharded" else whole_dims(x.shape)
            part = DimFactor(out.shape[dim], sharded=name == axis or is_sharded(dims[dim]))
            is_part = name == axis or one.kind == "sharded"
            found.append(of_dims(with_dim(dims, dim, (part,))) if is_part else _reshaped(one, out))
        return self.mode.set(out, tuple(found))

    def _gradient_share(
        self,
        after: AxisType | None,
        original: Callable[..., Tensor],
        x: Tensor,
        comm: Any,
        axis: str,
    ) -> Tensor:
        """A gradient that is replicated becomes partial, or (None) the other way round: each rank
        holds the same share of it.
        """

        def declare_gradient(out: Tensor) -> None:
            types = dict(zip(self.mode.axes, self.mode.types_of(out), strict=True))
            before = "replicated" if after else "partial"
            if types[axis].kind not in (before, "zero", "untyped"):
                self.mode.report(axis, f"the gradient of whole sequences is {types[axis].text}")
            types[axis] = after or replicated(tuple(out.shape))
            self.mode.set(out, tuple(types.values()))

        given = self.mode.types_of(x)

        def declare(out: Tensor) -> None:
            self.mode.set(out, given)

        return declared(original(x, comm, axis), self.mode, declare, declare_gradient)

    def _group_batch_norm(
        self, original: Callable[..., tuple[Tensor, Tensor]], *args: Any
    ) -> tuple[Tensor, Tensor]:
        """Not typed, as BatchNorm of one rank."""
        with self.mode.paused():
            outputs = original(*args)
        for out in outputs:
            self.mode.set(out, (UNTYPED,) * len(self.mode.axes))
        self.mode.report("+".join(self.mode.axes), "BatchNorm", is_certain=False)
        return outputs

    def _dequantize_into(self, original: Callable[..., None], *args: Any) -> None:
        """Frozen matrices are dequantized: they have the types of their parameters."""
        with self.mode.paused():
            original(*args)

    def _check_loss(self, loss: Tensor) -> None:
        """A loss is summed over all ranks: along data axes it is partial, of copies one is counted."""
        comm = self.step.model.comm
        for axis in self.mode.axes:
            one = self.mode.type_of(loss, axis)
            is_copy = axis in replicated_axes()
            if is_copy and comm.index(axis) > 0 and one.kind != "zero":
                self.mode.report(
                    axis, "the loss of the same tokens is counted on every rank", where="loss"
                )
            elif is_copy and one.kind not in ("replicated", "zero", "untyped"):
                self.mode.report(
                    axis, f"the loss is {one.text} on ranks with the same tokens", where="loss"
                )
            elif not is_copy and one.kind not in ("partial", "zero", "untyped"):
                self.mode.report(
                    axis, f"the loss is {one.text}; it is summed over all ranks", where="loss"
                )

    def _check_norm(self) -> None:
        """A gradient counts in the norm on one of the ranks that hold the same entries; one of a
        parameter that another stage holds, too, may count there.
        """
        model = self.step.model
        tied = {tie.name for tie in model.cross_stage_ties}
        for name, entries in self.step.grads.sharded_params.items():
            if entries.grad is None:
                continue
            over = self.step.grads.shard_axes[name]
            is_counted = grad_norm.is_first_holder(model, name, sharded_over=over)
            copies = self._copy_axes(entries.grad)
            if is_counted and copies:
                what = "a replicated gradient is counted in the norm on every rank"
                self.mode.report(copies[0], what, where=name)
            if not is_counted and self._is_alone(entries.grad) and name not in tied:
                what = "a gradient that ranks hold apart is not counted in the norm"
                self.mode.report("+".join(self.mode.axes), what, where=name)

    def _is_alone(self, gradient: Tensor) -> bool:
        """Whether no rank before this one holds any of its entries."""
        types = self.mode.types_of(gradient)
        return all(
            one.kind in ("sharded", "varying") or self.comm.index(axis) == 0
            for axis, one in zip(self.mode.axes, types, strict=True)
        )

    def _copy_axes(self, gradient: Tensor) -> tuple[str, ...]:
        """Axes along which another rank, before this one, holds the same entries."""
        types = self.mode.types_of(gradient)
        return tuple(
            axis
            for axis, one in zip(self.mode.axes, types, strict=True)
            if one.kind == "replicated" and self.comm.index(axis) > 0
        )


class _DeclaredSum:
    """A sum over ranks under way, of which the result is declared."""

    def __init__(
        self, started: Any, pieces: list[TypedPiece], comm: StepComm, axes: StateAxes
    ) -> None:
        self.started = started
        self.pieces = pieces
        self.comm = comm
        self.axes = axes

    def is_completed(self) -> bool:
        """Whether the started sum is completed."""
        return bool(self.started.is_completed())

    def start_replica_sum(self) -> None:
        """Start the sum over replicas, outside the mode."""
        with self.comm.mode.paused():
            self.started.start_replica_sum()

    def wait(self) -> Tensor:
        """The sum, with types."""
        with self.comm.mode.paused():
            out: Tensor = self.started.wait()
        is_shard = self.started.is_sharded
        sharded, copied = self.axes
        start = self.comm.index(sharded) * out.numel() if is_shard else 0
        summed = self.comm.summed_pieces(self.pieces, sharded, is_shard=is_shard)
        summed = self.comm.summed_pieces(summed, copied, is_shard=False)
        self.comm.mode.tensors.set_pieces(out, own_pieces(summed, start, start + out.numel()))
        return out


def _rows_of(one: AxisType, x: Tensor, num_rows: int) -> AxisType:
    """Of places of received rows, from the type of the counts of rows: counts of shards are partial."""
    if one.kind != "partial":
        return _reshaped(one, x)
    dims = tuple((DimFactor(size, sharded=size == num_rows),) for size in x.shape)
    return of_dims(dims)


def _reshaped(one: AxisType, x: Tensor) -> AxisType:
    """A type without shards for a tensor of another shape."""
    return replicated(tuple(x.shape)) if one.kind == "replicated" else one


def _gathered_products(
    _: Callable[..., Any], x_BsD: Tensor, matrices: Sequence[Tensor], comm: Comm, axis: Axis
) -> tuple[Tensor, list[Tensor]]:
    """By the collective that the messages stand for."""
    x_BSD = comm.all_gather(x_BsD, axis, dim=1)
    return x_BSD, [x_BSD @ matrix for matrix in matrices]


def _scattered_product(
    _: Callable[..., Any], x_BSI: Tensor, matrix_IO: Tensor, comm: Comm, axis: Axis
) -> Tensor:
    """By the collective that the messages stand for."""
    return comm.reduce_scatter(x_BSI @ matrix_IO, axis, dim=1)
