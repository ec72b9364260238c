"""Types of what a step starts from: the batch of a rank, its parameters, and what its stage receives."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from weft.core.dimension import position_axes, sequence_axes
from weft.core.shard import Stacked, sharded_over
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import ParallelModel, ParamShard
from weft.parallel.tensor.dims import DimFactor, Dims, whole_dims, with_dim
from weft.parallel.tensor.region import SEQ_DIM
from weft.planner.certificate.axis_types import AxisType, Types, of_dims
from weft.planner.certificate.type_mode import TypeMode


def token_types(x: Tensor, axes: Sequence[str], *, column_axes: Collection[str]) -> Types:
    """Types of a tensor of sequences: other ones on each rank of some axes, and along `column_axes`
    other columns.
    """
    found = []
    for axis in axes:
        place = None
        if axis in sequence_axes():
            place = 0
        elif axis in column_axes:
            place = SEQ_DIM
        dims = whole_dims(x.shape)
        if place is not None and place < x.dim():
            dims = with_dim(dims, place, (DimFactor(x.shape[place], sharded=True),))
        found.append(of_dims(dims))
    return tuple(found)


def declare_batch(batch: Batch, mode: TypeMode) -> None:
    """Declare the types of a rank's micro-batch."""

    def declare(x: Tensor) -> Tensor:
        return mode.set(x, token_types(x, mode.axes, column_axes=position_axes()))

    batch.map(declare)
    if batch.documents is None and batch.positions is not None:
        mode.set(batch.positions, tuple(map(_equal_rows, mode.types_of(batch.positions))))
    if batch.whole_documents is not None:
        whole = batch.whole_documents
        mode.set(whole, token_types(whole, mode.axes, column_axes=()))


def _equal_rows(one: AxisType) -> AxisType:
    """Of positions of sequences of one document: those of all sequences are equal."""
    (first, *_), *others = one.dims
    return of_dims(((DimFactor(first.size, repeated=True),), *others))


def param_types(
    param: ParamShard, shape: tuple[int, ...], model: ParallelModel, axes: Sequence[str]
) -> Types:
    """The types of a parameter, as the plan shards it."""
    found = []
    for axis in axes:
        dims: Dims = whole_dims(shape)
        for place, logical in enumerate(param.logical):
            if sharded_over(logical, model.plan.sharding_rule) != axis:
                continue
            parts: tuple[int, ...] = ()
            if isinstance(logical, Stacked):
                parts = tuple(box.shape[place] for box in param.shard.boxes)
            dims = with_dim(dims, place, (DimFactor(shape[place], True, parts),))
        found.append(of_dims(dims))
    return tuple(found)
