"""Rules for shards of operations that choose entries by an index, or add to chosen ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    is_sharded,
    length,
    whole_dim,
    whole_dims,
    with_dim,
)
from weft.parallel.tensor.traced_op import places_named
from weft.planner.certificate.axis_types import PARTIAL, AxisType, UntypedError, of_dims, replicated
from weft.planner.certificate.rule_parts import (
    ShardRule,
    TypedOp,
    broadcast,
    check_whole,
    is_summed,
    plain_reduction,
)


def _embedding_backward(op: TypedOp) -> list[AxisType]:
    """embedding_dense_backward: [..., D], index[...] -> [V, D], a sum over all tokens."""
    gradient, index = op.operands
    *tokens, features = gradient
    places = [
        is_summed(of_gradient, of_index)
        for of_gradient, of_index in zip(tokens, index, strict=True)
    ]
    if any(places):
        if is_sharded(features):
            raise ShardingError("gradient of an embedding with sharded tokens and features")
        return [PARTIAL]
    return [of_dims((whole_dim(op.shape[0]), features))]


def _gather(op: TypedOp) -> list[AxisType]:
    """gather along a whole dim: the dims of the index; of a sharded one what this rank holds."""
    place = op.args["dim"] % len(op.dims)
    source, index = op.operands[:2]
    if is_sharded(source[place]):
        raise ShardingError("gather along a sharded dim")
    rest = [dims[:place] + dims[place + 1 :] for dims in (source, index)]
    shape = op.shape[:place] + op.shape[place + 1 :]
    others = broadcast(op, rest, shape)
    return [of_dims((*others[:place], index[place], *others[place:]))]


def _scatter(op: TypedOp) -> list[AxisType]:
    """scatter, scatter_add: sums over shards of the index are partial."""
    place = op.args["dim"] % len(op.dims)
    target, index, *_ = op.operands
    if is_sharded(index[place]) and not is_sharded(target[place]):
        if "add" not in op.name:
            raise ShardingError(f"{op.name} of sharded entries into a whole dim")
        return [PARTIAL]
    dims = []
    for at, (own, other) in enumerate(zip(target, index, strict=True)):
        dims.append(own if at == place or is_sharded(own) else other)
    return [of_dims(tuple(dims))]


def _index_select(op: TypedOp) -> list[AxisType]:
    """Rows of a whole dim; of a sharded one by a sharded index: rows of this rank by its own places."""
    place = op.place()
    index = op.operands[1]
    if is_sharded(op.dims[place]) and not is_sharded(index[0]):
        raise ShardingError("index_select along a sharded dim by a whole index")
    return [of_dims(with_dim(op.dims, place, index[0]))]


def _index_add(op: TypedOp) -> list[AxisType]:
    """index_add: rows of a source to rows of a target; of sharded rows a part of the sum."""
    place = op.args["dim"] % len(op.dims)
    target, index, source = op.operands
    if is_sharded(target[place]):
        raise UntypedError(f"{op.name} into a sharded dim")
    is_partial = is_summed(index[0], source[place])
    one = whole_dim(1)
    rest = [with_dim(dims, place, one) for dims in (target, source)]
    dims = with_dim(broadcast(op, rest, op.shape), place, target[place])
    if not is_partial:
        return [of_dims(dims)]
    if any(map(is_sharded, dims)):
        raise ShardingError(f"{op.name} of sharded rows to a target that is sharded")
    return [PARTIAL]


def _index(op: TypedOp) -> list[AxisType]:
    """x[:, i, j]: entries at places of whole dims; where all entries of a dim are equal, the places do not
    matter.
    """
    source, *numbers = op.operands
    places = _indexed_places(op, source)
    indices = [
        _anywhere(index) if all(factor.repeated for factor in source[place]) else index
        for place, index in zip(places, numbers, strict=True)
    ]
    first = _first_chosen(places)
    num_chosen = max(map(len, indices))
    chosen = broadcast(op, indices, op.shape[first : first + num_chosen])
    kept = [dim for place, dim in enumerate(source) if place not in places]
    return [of_dims((*kept[:first], *chosen, *kept[first:]))]


def _anywhere(index: Dims) -> Dims:
    """The dims of places in a dim of equal entries."""
    return tuple((DimFactor(length(dim), repeated=True),) for dim in index)


def _index_put(op: TypedOp) -> list[AxisType]:
    """x[:, i, j] = values, or += values, of which a rank adds those that it has."""
    source, *indices, values = op.operands
    places = _indexed_places(op, source)
    first = _first_chosen(places)
    num_chosen = max(map(len, indices))
    num_kept = len(source) - len(places)
    if len(values) != num_chosen + num_kept:
        raise UntypedError(f"{op.name} of values of fewer dims")
    chosen = values[first : first + num_chosen]
    if any(map(is_sharded, chosen)) or any(is_sharded(dim) for each in indices for dim in each):
        if not op.args.get("accumulate", False):
            raise ShardingError(f"{op.name} of sharded entries into a whole dim")
        return [PARTIAL]
    of_values = iter((*values[:first], *values[first + num_chosen :]))
    dims: list[Dim] = []
    for place, dim in enumerate(source):
        pair = [(dim,)] if place in places else [(dim,), (next(of_values),)]
        dims += broadcast(op, pair, op.shape[place : place + 1])
    return [of_dims(tuple(dims))]


def _indexed_places(op: TypedOp, source: Dims) -> list[int]:
    places = [place for place, index in enumerate(op.args["indices"]) if index is not None]
    if any(is_sharded(source[place]) for place in places):
        raise UntypedError(f"{op.name} of a sharded dim")
    return places


def _first_chosen(places: Sequence[int]) -> int:
    """Where the dims of the indices stand: at the first one, or in front where others lie between."""
    is_block = places[-1] - places[0] == len(places) - 1
    return places[0] if is_block else 0


def _embedding_bag(op: TypedOp) -> list[AxisType]:
    """Bags of rows of a whole table: a rank's bags are of its own ids."""
    table, ids, *_ = op.operands
    check_whole(op, table, range(len(table)))
    if not is_sharded(ids[0]):
        return [replicated(tuple(out.shape)) for out in op.outputs]
    own = [(DimFactor(size, sharded=True),) for (size, *_) in (out.shape for out in op.outputs)]
    return [
        of_dims((first, *whole_dims(out.shape[1:])))
        for first, out in zip(own, op.outputs, strict=True)
    ]


def _embedding_bag_backward(op: TypedOp) -> list[AxisType]:
    """The gradient of the table: a sum over all ids."""
    return [PARTIAL if is_summed(op.operands[1][0]) else replicated(op.shape)]


def _sorted(op: TypedOp) -> list[AxisType]:
    """topk, sort, kthvalue, median: values and places."""
    places = places_named(op.dims, op.args.get("dim", -1))
    check_whole(op, op.dims, places)
    return plain_reduction(op, places)


INDEX_RULES: Mapping[str, ShardRule] = {
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_forward_only": _embedding_bag,
    "_embedding_bag_backward": _embedding_bag_backward,
    "_embedding_bag_dense_backward": _embedding_bag_backward,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_": _scatter,
    "scatter_add": _scatter,
    "scatter_add_": _scatter,
    "index": _index,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "index_add": _index_add,
    "index_add_": _index_add,
    "index_select": _index_select,
    "topk": _sorted,
    "sort": _sorted,
    "kthvalue": _sorted,
    "median": _sorted,
    "mode": _sorted,
}
"""By the name of the operation in torch.ops.aten."""
