"""Rules for shards: which dims of an operation's results are sharded, or that they are partial sums.

They stand beside the rules of the sharding trace (`parallel/tensor/propagate`), which rejects what
these find to be partial, and knows no backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from weft.parallel.tensor import shape_rules
from weft.parallel.tensor.dims import (
    Dim,
    DimFactor,
    Dims,
    ShardingError,
    is_repeated,
    is_sharded,
    length,
    regroup,
    whole_dim,
    whole_dims,
    with_dim,
)
from weft.parallel.tensor.traced_op import TracedOp, broadcast_dims, places_named
from weft.planner.certificate.axis_types import (
    PARTIAL,
    VARYING,
    AxisType,
    UntypedError,
    of_dims,
    replicated,
)

ShardRule = Callable[[TracedOp], list[AxisType]]
"""Types of the results along an axis over which no operand is partial or varying."""


def _summed(*dims: Dim) -> bool:
    """Whether a product sums over these dims, which belong together, as shards.

    Raises:
        ShardingError: one of them is sharded and another one is not.
    """
    sharded = [is_sharded(dim) for dim in dims]
    if any(sharded) and not all(sharded):
        whole = [dim for dim in dims if not is_sharded(dim)]
        if any(not factor.repeated and factor.size > 1 for dim in whole for factor in dim):
            raise ShardingError("a sharded dim is multiplied with a whole one")
    return any(sharded)


def _matrix_product(op: TracedOp) -> list[AxisType]:
    """mm, bmm, addmm, baddbmm: [..., N, K] x [..., K, M]; partial where K is sharded."""
    *added, left, right = op.operands
    *left_batch, rows, left_inner = left
    *right_batch, right_inner, columns = right
    is_partial = _summed(left_inner, right_inner)
    for left_dim, right_dim in zip(left_batch, right_batch, strict=True):
        if is_sharded(left_dim) != is_sharded(right_dim):
            raise UntypedError(f"{op.name} of a sharded batch dim with a whole one")
    if is_partial:
        if any(is_sharded(dim) for dim in (*left_batch, rows, columns)):
            raise ShardingError(f"{op.name} sums over shards of a result that is sharded")
        if added:
            raise ShardingError(f"{op.name} adds a tensor to a partial sum, once on every rank")
        return [PARTIAL]
    return [of_dims((*left_batch, rows, columns))]


def _addmm_in_place(op: TracedOp) -> list[AxisType]:
    """total.addmm_(a, b), of a total that is no partial sum."""
    return _matrix_product(op)


def _linear(op: TracedOp) -> list[AxisType]:
    x, weight, *biases = op.operands
    if _summed(x[-1], weight[1]):
        if biases:
            raise ShardingError("linear adds a bias to a partial sum, once on every rank")
        return [PARTIAL]
    features = weight[0]
    for bias in biases:
        if is_sharded(bias[0]) != is_sharded(features):
            raise ShardingError(
                "linear of a sharded weight and a whole bias, or the other way round"
            )
    return [of_dims((*x[:-1], features))]


def _sum(op: TracedOp) -> list[AxisType]:
    """sum: partial where a dim that is summed is sharded."""
    places = places_named(op.dims, op.args.get("dim"))
    is_partial = any(is_sharded(op.dims[place]) for place in places)
    left = [is_sharded(dim) for place, dim in enumerate(op.dims) if place not in places]
    if is_partial and any(left):
        raise ShardingError("sum over one of two sharded dims")
    if is_partial:
        return [PARTIAL]
    keeps = op.outputs[0].dim() == len(op.dims)
    dims: list[Dim] = []
    for place, dim in enumerate(op.dims):
        if place not in places:
            dims.append(dim)
        elif keeps:
            dims.append(whole_dim(1))
    return [of_dims(tuple(dims))]


def _largest(op: TracedOp) -> list[AxisType]:
    """amax, amin, max, min: along a sharded dim each rank has the largest of its own."""
    places = places_named(op.dims, op.args.get("dim"))
    if any(is_sharded(op.dims[place]) for place in places):
        return [VARYING for _ in op.outputs]
    return _plain_reduction(op, places)


def _plain_reduction(op: TracedOp, places: Sequence[int]) -> list[AxisType]:
    found = []
    for out in op.outputs:
        keeps = out.dim() == len(op.dims)
        dims: list[Dim] = []
        for place, dim in enumerate(op.dims):
            if place not in places:
                dims.append(dim)
            elif keeps:
                dims.append(whole_dim(out.shape[place]))
        found.append(of_dims(tuple(dims)))
    return found


def _norm_backward(op: TracedOp) -> list[AxisType]:
    """native_layer_norm_backward, _fused_rms_norm_backward: dx like x, gradients of weight and bias
    are sums over all leading dims.
    """
    gradient, x = op.operands[:2]
    num_leading = len(x) - len(op.args["normalized_shape"])
    for dims in (gradient, x):
        if any(map(is_sharded, dims[num_leading:])):
            raise ShardingError(f"{op.name} over a sharded dim")
    dx = _broadcast(op, [gradient, x], op.shape)
    is_partial = any(map(is_sharded, dx[:num_leading]))
    found = []
    for place, out in enumerate(op.outputs):
        if place == 0:
            found.append(of_dims(dx))
        else:
            found.append(PARTIAL if is_partial else replicated(tuple(out.shape)))
    return found


def _norm(op: TracedOp) -> list[AxisType]:
    """native_layer_norm, _fused_rms_norm: the statistics have the leading dims."""
    x = op.dims
    num_leading = len(x) - len(op.args["normalized_shape"])
    if any(map(is_sharded, x[num_leading:])):
        raise ShardingError(f"{op.name} over a sharded dim")
    found = [of_dims(x)]
    for out in op.outputs[1:]:
        rest = whole_dims(out.shape[num_leading:])
        found.append(of_dims((*x[:num_leading], *rest)))
    return found


def _embedding_backward(op: TracedOp) -> list[AxisType]:
    """embedding_dense_backward: [..., D], index[...] -> [V, D], a sum over all tokens."""
    gradient, index = op.operands
    *tokens, features = gradient
    places = [
        _summed(of_gradient, of_index) for of_gradient, of_index in zip(tokens, index, strict=True)
    ]
    if any(places):
        if is_sharded(features):
            raise ShardingError("gradient of an embedding with sharded tokens and features")
        return [PARTIAL]
    return [of_dims((whole_dim(op.shape[0]), features))]


def _softmax_backward(op: TracedOp) -> list[AxisType]:
    place = op.args["dim"] % len(op.dims)
    dims = _broadcast(op, op.operands[:2], op.shape)
    if is_sharded(dims[place]):
        raise ShardingError(f"{op.name} over a sharded dim")
    return [of_dims(dims)]


def _slice_backward(op: TracedOp) -> list[AxisType]:
    """Also select_backward: the gradient among zeros."""
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


def _nll_loss(op: TracedOp) -> list[AxisType]:
    """nll_loss_forward: logprobs_NV, targets_N -> sum and number of targets."""
    logprobs, targets = op.operands[:2]
    if is_sharded(logprobs[1]):
        raise ShardingError("the loss reads logits that are sharded along the vocabulary")
    if op.args.get("reduction", 1) == 1:
        if is_sharded(logprobs[0]):
            raise ShardingError("the loss is a mean over sharded tokens")
        return [replicated(()) for _ in op.outputs]
    is_partial = _summed(logprobs[0], targets[0])
    if op.args.get("reduction") == 0:
        number = PARTIAL if is_partial else replicated(())
        return [of_dims((logprobs[0],)), number]
    return [PARTIAL if is_partial else replicated(tuple(out.shape)) for out in op.outputs]


def _nll_loss_backward(op: TracedOp) -> list[AxisType]:
    """The gradient of log-probabilities; the number of targets is not read for sums."""
    return [of_dims(op.operands[1])]


def _gather(op: TracedOp) -> list[AxisType]:
    """gather along a whole dim: the dims of the index; of a sharded one what this rank holds."""
    place = op.args["dim"] % len(op.dims)
    source, index = op.operands[:2]
    if is_sharded(source[place]):
        raise ShardingError("gather along a sharded dim")
    rest = [dims[:place] + dims[place + 1 :] for dims in (source, index)]
    shape = op.shape[:place] + op.shape[place + 1 :]
    others = _broadcast(op, rest, shape)
    return [of_dims((*others[:place], index[place], *others[place:]))]


def _scatter(op: TracedOp) -> list[AxisType]:
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


def _index(op: TracedOp) -> list[AxisType]:
    """x[index]: rows of a whole first dim."""
    indices = op.args["indices"]
    source, *others = op.operands
    if len(indices) != 1 or len(others) != 1:
        raise UntypedError("index by several tensors")
    if is_sharded(source[0]):
        raise ShardingError("index of a sharded dim")
    return [of_dims((*others[0], *source[1:]))]


def _view(op: TracedOp) -> list[AxisType]:
    """The same entries in another shape."""
    is_new_batch = op.shape[:2] == (1, 1) and len(op.dims) < len(op.shape)
    if is_new_batch and is_sharded(op.dims[0]) and length(op.dims[0]) == 1:
        raise UntypedError(
            f"{op.name} of one token: whether it is a sequence or a column is not known"
        )
    written = op.args.get("size", ())
    inferred = list(written).index(-1) if -1 in written else None
    return [of_dims(regroup(op.dims, op.shape, inferred=inferred, name=op.name, has_tokens=True))]


def _as_strided(op: TracedOp) -> list[AxisType]:
    """A view of a contiguous result by sizes and strides, as recomputed results are: a sharded
    factor is in the dim that steps over the entries where its last unit begins.
    """
    if tuple(map(length, op.dims)) == op.shape:
        return [of_dims(op.dims)]
    dims: list[Dim] = [(DimFactor(size),) for size in op.shape]
    step = math.prod(map(length, op.dims))
    for factor in (factor for dim in op.dims for factor in dim):
        behind, step = step, step // factor.size
        if factor.sharded:
            place = _stepping_dim(op, step, behind)
            dims[place] = (DimFactor(op.shape[place], sharded=True),)
    return [of_dims(tuple(dims))]


def _stepping_dim(op: TracedOp, step: int, behind: int) -> int:
    """The dim of a strided view that steps over entries from `step` up to `behind`."""
    for place, (size, stride) in enumerate(zip(op.shape, op.args["stride"], strict=True)):
        is_unit = size == 1 and step == behind == stride
        if is_unit or (size > 1 and stride < behind <= stride * size):
            return place
    raise UntypedError("as_strided to another shape")


def _index_select(op: TracedOp) -> list[AxisType]:
    """Rows of a whole dim; of a sharded one by a sharded index: rows of this rank by its own places."""
    place = op.place()
    index = op.operands[1]
    if is_sharded(op.dims[place]) and not is_sharded(index[0]):
        raise ShardingError("index_select along a sharded dim by a whole index")
    return [of_dims(with_dim(op.dims, place, index[0]))]


def _select(op: TracedOp) -> list[AxisType]:
    """select, unbind: of a sharded dim an entry of this rank."""
    place = op.place()
    if is_sharded(op.dims[place]):
        return [VARYING for _ in op.outputs]
    return [of_dims(with_dim(op.dims, place)) for _ in op.outputs]


def _split(op: TracedOp) -> list[AxisType]:
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


def _attention(op: TracedOp) -> list[AxisType]:
    raise UntypedError(f"{op.name} outside of Attend")


def entrywise(op: TracedOp) -> list[AxisType]:
    """Operations on entries."""
    return [of_dims(_broadcast(op, op.operands, tuple(out.shape))) for out in op.outputs]


def _copy_into(op: TracedOp) -> list[AxisType]:
    """dst.copy_(src): dst holds what src held."""
    return [of_dims(_broadcast(op, op.operands[1:], op.shape))]


def _broadcast(op: TracedOp, operands: Sequence[Dims], shape: tuple[int, ...]) -> Dims:
    """Along a dim all operands are sharded or have equal entries, or none is sharded; factors stay
    as they are.
    """
    broadcast_dims(op.name, operands, shape)  # raises where they do not fit
    dims: list[Dim] = []
    for place in range(-len(shape), 0):
        aligned = [each[place] for each in operands if len(each) >= -place]
        sharded = [dim for dim in aligned if is_sharded(dim)]
        is_whole = any(not is_repeated(dim) for dim in aligned)
        plain = (DimFactor(shape[place], repeated=not is_whole),)
        dims.append(sharded[0] if sharded else plain)
    return tuple(dims)


def _like_first(op: TracedOp) -> list[AxisType]:
    return [of_dims(op.dims) for _ in op.outputs]


def _sorted(op: TracedOp) -> list[AxisType]:
    """topk, sort: values and places."""
    places = places_named(op.dims, op.args.get("dim", -1))
    if any(is_sharded(op.dims[place]) for place in places):
        raise ShardingError(f"{op.name} over a sharded dim")
    return _plain_reduction(op, places)


SHARD_RULES: Mapping[str, ShardRule] = {
    "mm": _matrix_product,
    "bmm": _matrix_product,
    "addmm": _matrix_product,
    "baddbmm": _matrix_product,
    "addmm_": _addmm_in_place,
    "linear": _linear,
    "sum": _sum,
    "amax": _largest,
    "amin": _largest,
    "max": _largest,
    "min": _largest,
    "native_layer_norm": _norm,
    "_fused_rms_norm": _norm,
    "native_layer_norm_backward": _norm_backward,
    "_fused_rms_norm_backward": _norm_backward,
    "embedding_dense_backward": _embedding_backward,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
    "slice_backward": _slice_backward,
    "select_backward": _slice_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss_backward": _nll_loss_backward,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_add_": _scatter,
    "index": _index,
    "index_select": _index_select,
    "view": _view,
    "_unsafe_view": _view,
    "as_strided": _as_strided,
    "select": _select,
    "unbind": _select,
    "split": _split,
    "split_with_sizes": _split,
    "slice": _split,
    "topk": _sorted,
    "sort": _sorted,
    "scaled_dot_product_attention": _attention,
    "copy": _like_first,
    "floor_divide": entrywise,
    "copy_": _copy_into,
}
"""By the name of the operation in torch.ops.aten."""
