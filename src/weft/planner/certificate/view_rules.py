"""Rules for shards of operations that rearrange entries: views, parts of dims, diagonals, windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from weft.parallel.tensor import shape_rules
from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    is_sharded,
    length,
    regroup,
    whole_dim,
    with_dim,
)
from weft.parallel.tensor.traced_op import places_named
from weft.planner.certificate.axis_types import PARTIAL, VARYING, AxisType, UntypedError, of_dims
from weft.planner.certificate.rule_parts import ShardRule, TypedOp, check_whole


def _view(op: TypedOp) -> list[AxisType]:
    """The same entries in another shape; of a rank's only token the axis says whether it is a
    sequence or a column.
    """
    dims, shape = op.dims, op.shape
    old = tuple(map(length, dims))
    if old == shape:
        return [of_dims(dims)]
    is_one_token = shape[:2] == (1, 1)
    if old[:2] == shape[:2] and old[1:2] == (1,):  # one token, or one head of each sequence
        return [of_dims((*dims[:2], *_regrouped(op, 2, has_tokens=False)))]
    if len(shape) < len(old) and old[0] == shape[0] and old[1] == 1 and is_sharded(dims[1]):
        # one head, or one column, of each sequence: it is counted with the sequences
        return [of_dims(((*dims[0], *dims[1]), *_regrouped(op, 1, has_tokens=False, num_old=2)))]
    if is_one_token and op.token_dim == 1 and old[:1] == (1,) and len(old) < len(shape):
        behind_batch = _regrouped(op, 1, has_tokens=True, num_old=0)
        return [of_dims((whole_dim(1), *behind_batch))]
    return [of_dims(_regrouped(op, 0, has_tokens=True))]


def _regrouped(op: TypedOp, first: int, *, has_tokens: bool, num_old: int | None = None) -> Dims:
    """Dims from `first` on of those of the operand from there on, or from `num_old` on."""
    written = list(op.args.get("size", ()))
    inferred = written.index(-1) - first if -1 in written[first:] else None
    old = op.dims[first if num_old is None else num_old :]
    return regroup(old, op.shape[first:], inferred=inferred, name=op.name, has_tokens=has_tokens)


def _as_strided(op: TypedOp) -> list[AxisType]:
    """A view of a result by sizes and strides, as those of recomputed results are. With the strides of
    the result it is slices of it. Else the result is contiguous, and a sharded factor is in the dim
    that steps over the entries where its last unit begins.
    """
    whole: Tensor = op.args["self"]
    if tuple(op.args["stride"]) == whole.stride():
        return _slices(op, whole)
    dims: list[Dim] = [(DimFactor(size),) for size in op.shape]
    step = math.prod(map(length, op.dims))
    for factor in (factor for dim in op.dims for factor in dim):
        behind, step = step, step // factor.size
        if factor.sharded:
            place = _stepping_dim(op, step, behind)
            dims[place] = (DimFactor(op.shape[place], sharded=True),)
    return [of_dims(tuple(dims))]


def _slices(op: TypedOp, whole: Tensor) -> list[AxisType]:
    """A view with the strides of the whole: a range of places along each dim."""
    offset = op.args.get("storage_offset")
    left = 0 if offset is None else offset - int(whole.storage_offset())
    strides = whole.stride()
    dims = op.dims
    for place in sorted(range(len(dims)), key=lambda place: -strides[place]):
        start, left = divmod(left, strides[place]) if strides[place] else (0, left)
        named = {"dim": place, "start": start, "step": 1}
        part = replace(op, name="slice", args=named, operands=(dims,))
        (found,) = _split(part)
        dims = found.dims
    return [of_dims(dims)]


def _stepping_dim(op: TypedOp, step: int, behind: int) -> int:
    """The dim of a strided view that steps over entries from `step` up to `behind`."""
    for place, (size, stride) in enumerate(zip(op.shape, op.args["stride"], strict=True)):
        is_unit = size == 1 and step == behind == stride
        if is_unit or (size > 1 and stride < behind <= stride * size):
            return place
    raise UntypedError("as_strided to another shape")


def _select(op: TypedOp) -> list[AxisType]:
    """select, unbind: all entries of a rank's own, as of its experts, are varying; one of them, as
    of its first sequence, is another one than on one device. Tokens that were taken apart may be
    put together again in any order.
    """
    place = op.place()
    if is_sharded(op.dims[place]) and (op.name == "select" or place == op.token_dim == 1):
        raise UntypedError(f"{op.name} of entries of a sharded dim")
    if is_sharded(op.dims[place]):
        return [VARYING for _ in op.outputs]
    return [of_dims(with_dim(op.dims, place)) for _ in op.outputs]


def _split(op: TypedOp) -> list[AxisType]:
    """split, slice: parts of a whole dim or of a `Stacked` one; of tokens in one or two dims, whose
    order is this rank's own, any part.
    """
    place = op.place()
    dim = op.dims[place]
    is_list_of_tokens = len(op.dims) <= 2 and is_sharded(dim) and not dim[0].parts
    if not is_list_of_tokens:
        return list(map(of_dims, shape_rules.split_dim(op)))
    found = []
    for out in op.outputs:
        part = (DimFactor(out.shape[place], sharded=True),)
        found.append(of_dims(with_dim(op.dims, place, part)))
    return found


def _slice_backward(op: TypedOp) -> list[AxisType]:
    """Place the gradient of a slice among zeros; of select, too."""
    dims = list(op.dims)
    place = op.args["dim"] % len(op.shape)
    size = op.shape[place]
    if op.name == "select_backward":
        dims.insert(place, whole_dim(size))
    elif length(dims[place]) != size:
        if is_sharded(dims[place]):
            dims[place] = (DimFactor(size, sharded=True),)
        else:
            dims[place] = whole_dim(size)
    return [of_dims(tuple(dims))]


def _squeeze(op: TypedOp) -> list[AxisType]:
    """Of a sharded dim of which each rank has one entry that entry, as a sum over the dim is."""
    asked = places_named(op.dims, op.args.get("dim"))
    gone = [place for place in asked if length(op.dims[place]) == 1]
    kept = tuple(dim for place, dim in enumerate(op.dims) if place not in gone)
    if not any(is_sharded(op.dims[place]) for place in gone):
        return [of_dims(kept)]
    if any(map(is_sharded, kept)):
        raise ShardingError("squeeze of one of two sharded dims")
    return [PARTIAL]


def _diagonal(op: TypedOp) -> list[AxisType]:
    """diagonal: two dims become one, behind the others."""
    places = [op.args.get(name, default) for name, default in (("dim1", 0), ("dim2", 1))]
    gone = [place % len(op.dims) for place in places]
    check_whole(op, op.dims, gone)
    kept = [dim for place, dim in enumerate(op.dims) if place not in gone]
    return [of_dims((*kept, whole_dim(op.shape[-1])))]


def _diagonal_backward(op: TypedOp) -> list[AxisType]:
    """Turn the last dim into two; diag_embed does the same."""
    num_dims = len(op.shape)
    names = (("dim1", -2), ("dim2", -1)) if op.name == "diag_embed" else (("dim1", 0), ("dim2", 1))
    new = [op.args.get(name, default) % num_dims for name, default in names]
    check_whole(op, op.dims, [len(op.dims) - 1])
    kept = iter(op.dims)
    dims = [whole_dim(op.shape[at]) if at in new else next(kept) for at in range(num_dims)]
    return [of_dims(tuple(dims))]


def _unfold(op: TypedOp) -> list[AxisType]:
    """Windows along a whole dim, their entries in a last dim."""
    place = op.args["dimension"] % len(op.dims)
    check_whole(op, op.dims, [place])
    windows = with_dim(op.dims, place, whole_dim(op.shape[place]))
    return [of_dims((*windows, whole_dim(op.shape[-1])))]


def _unfold_backward(op: TypedOp) -> list[AxisType]:
    place = op.args["dim"] % len(op.shape)
    check_whole(op, op.dims, [place, len(op.dims) - 1])
    return [of_dims(with_dim(op.dims[:-1], place, whole_dim(op.shape[place])))]


def _as_complex(op: TypedOp) -> list[AxisType]:
    check_whole(op, op.dims, [len(op.dims) - 1])
    return [of_dims(op.dims[:-1])]


def _as_real(op: TypedOp) -> list[AxisType]:
    return [of_dims((*op.dims, whole_dim(2)))]


VIEW_RULES: Mapping[str, ShardRule] = {
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "as_strided": _as_strided,
    "select": _select,
    "unbind": _select,
    "split": _split,
    "unsafe_split": _split,
    "split_with_sizes": _split,
    "slice": _split,
    "slice_backward": _slice_backward,
    "select_backward": _slice_backward,
    "squeeze": _squeeze,
    "diagonal": _diagonal,
    "diagonal_backward": _diagonal_backward,
    "diag_embed": _diagonal_backward,
    "unfold": _unfold,
    "unfold_backward": _unfold_backward,
    "view_as_complex": _as_complex,
    "view_as_real": _as_real,
}
"""By the name of the operation in torch.ops.aten."""
