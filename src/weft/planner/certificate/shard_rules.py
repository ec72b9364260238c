"""Rules for shards: which dims of an operation's results are sharded, or that they are partial sums.

They stand beside the rules of the sharding trace (`parallel/tensor/propagate`), which rejects what
these find to be partial, and knows no backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from weft.parallel.tensor.dims import (
    Dim,
    ShardingError,
    is_sharded,
    whole_dim,
    whole_dims,
    with_dim,
)
from weft.parallel.tensor.traced_op import places_named
from weft.planner.certificate.axis_types import PARTIAL, VARYING, AxisType, of_dims, replicated
from weft.planner.certificate.index_rules import INDEX_RULES
from weft.planner.certificate.row_rules import ROW_RULES
from weft.planner.certificate.rule_parts import (
    ShardRule,
    TypedOp,
    asked_for,
    broadcast,
    check_whole,
    entrywise,
    is_summed,
    like_first,
    plain_reduction,
)
from weft.planner.certificate.view_rules import VIEW_RULES


def _matrix_product(op: TypedOp) -> list[AxisType]:
    """mm, bmm, addmm, baddbmm: [..., N, K] x [..., K, M]; partial where K is sharded."""
    *added, left, right = op.operands
    *left_batch, rows, left_inner = left
    *right_batch, right_inner, columns = right
    is_partial = is_summed(left_inner, right_inner)
    batch = broadcast(op, [tuple(left_batch), tuple(right_batch)], op.shape[:-2])
    if is_partial:
        if any(is_sharded(dim) for dim in (*batch, rows, columns)):
            raise ShardingError(f"{op.name} sums over shards of a result that is sharded")
        if added:
            raise ShardingError(f"{op.name} adds a tensor to a partial sum, once on every rank")
        return [PARTIAL]
    return [of_dims(broadcast(op, [(*batch, rows, columns), *added], op.shape))]


def _scaled_product(op: TypedOp) -> list[AxisType]:
    """_scaled_mm(a, b, scales of rows of a and columns of b): a product of numbers in fp8."""
    return _matrix_product(replace(op, operands=op.operands[:2]))


def _addmm_in_place(op: TypedOp) -> list[AxisType]:
    """total.addmm_(a, b), of a total that is no partial sum."""
    return _matrix_product(op)


def _linear(op: TypedOp) -> list[AxisType]:
    x, weight, *biases = op.operands
    if is_summed(x[-1], weight[1]):
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


def _sum(op: TypedOp) -> list[AxisType]:
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


def _largest(op: TypedOp) -> list[AxisType]:
    """amax, amin, max, min: along a sharded dim each rank has the largest of its own."""
    places = places_named(op.dims, op.args.get("dim"))
    if any(is_sharded(op.dims[place]) for place in places):
        return [VARYING for _ in op.outputs]
    return plain_reduction(op, places)


def _vector_norm(op: TypedOp) -> list[AxisType]:
    """linalg_vector_norm: that of infinity is the largest magnitude; of parts, others are no norms."""
    if op.args.get("ord") == math.inf:
        return _largest(op)
    places = places_named(op.dims, op.args.get("dim"))
    if any(is_sharded(op.dims[place]) for place in places):
        raise ShardingError(f"{op.name} over a sharded dim")
    return plain_reduction(op, places)


def _norm_backward(op: TypedOp) -> list[AxisType]:
    """native_layer_norm_backward, _fused_rms_norm_backward: dx like x, gradients of weight and bias
    are sums over all leading dims.
    """
    gradient, x = op.operands[:2]
    num_leading = len(x) - len(op.args["normalized_shape"])
    for dims in (gradient, x):
        check_whole(op, dims, range(num_leading, len(x)))
    dx = broadcast(op, [gradient, x], op.args["input"].shape)
    own = replicated(tuple(op.args["normalized_shape"]))
    of_params = PARTIAL if any(map(is_sharded, dx)) else own
    mask = op.args["output_mask"]
    return asked_for(op, [of_dims(dx), *(of_params for _ in mask[1:])])


def _norm(op: TypedOp) -> list[AxisType]:
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


def _softmax_backward(op: TypedOp) -> list[AxisType]:
    place = op.args["dim"] % len(op.dims)
    dims = broadcast(op, op.operands[:2], op.shape)
    if is_sharded(dims[place]):
        raise ShardingError(f"{op.name} over a sharded dim")
    return [of_dims(dims)]


def _nll_loss(op: TypedOp) -> list[AxisType]:
    """nll_loss_forward: logprobs_NV (or NV..), targets_N -> losses or their sum, and the number of
    targets.
    """
    logprobs, targets = op.operands[:2]
    if is_sharded(logprobs[1]):
        raise ShardingError("the loss reads logits that are sharded along the vocabulary")
    of_targets = broadcast(op, [with_dim(logprobs, 1), targets], op.args["target"].shape)
    is_partial = any(map(is_sharded, of_targets))
    number = PARTIAL if is_partial else replicated(())
    if op.args.get("reduction", 1) == 0:
        return [of_dims(of_targets), number]
    return [_reduced_loss(op, is_partial=is_partial), number]


def _reduced_loss(op: TypedOp, *, is_partial: bool) -> AxisType:
    """The sum or the mean of losses, of which a rank may have its own."""
    if is_partial and op.args.get("reduction", 1) == 1:
        raise ShardingError("the loss is a mean over sharded tokens")
    return PARTIAL if is_partial else replicated(())


def _loss_of_entries(op: TypedOp) -> list[AxisType]:
    """mse_loss, huber_loss, binary_cross_entropy_with_logits: of entries, or their sum or mean."""
    shape = op.args["self"].shape
    dims = broadcast(op, op.operands, shape)
    if op.args.get("reduction", 1) == 0:
        return [of_dims(dims)]
    return [_reduced_loss(op, is_partial=any(map(is_sharded, dims)))]


def _nll_loss_backward(op: TypedOp) -> list[AxisType]:
    """The gradient of log-probabilities; the number of targets is not read for sums."""
    return [of_dims(op.operands[1])]


def _copy_into(op: TypedOp) -> list[AxisType]:
    """dst.copy_(src): dst holds what src held."""
    return [of_dims(broadcast(op, op.operands[1:], op.shape))]


_RULES: Mapping[ShardRule, tuple[str, ...]] = {
    _matrix_product: ("mm", "bmm", "addmm", "baddbmm"),
    _scaled_product: ("_scaled_mm",),
    _addmm_in_place: ("addmm_",),
    _linear: ("linear",),
    _sum: ("sum",),
    _largest: ("amax", "amin", "max", "min"),
    _vector_norm: ("linalg_vector_norm",),
    _norm: ("native_layer_norm", "_fused_rms_norm"),
    _norm_backward: ("native_layer_norm_backward", "_fused_rms_norm_backward"),
    _softmax_backward: ("_softmax_backward_data", "_log_softmax_backward_data"),
    _nll_loss: ("nll_loss_forward", "nll_loss2d_forward"),
    _nll_loss_backward: ("nll_loss_backward", "nll_loss2d_backward"),
    _loss_of_entries: ("mse_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits",
                       "binary_cross_entropy", "soft_margin_loss"),
    like_first: ("copy",),
    _copy_into: ("copy_",),
    entrywise: (
        "floor_divide", "polar", "masked_fill", "masked_fill_", "log_sigmoid_forward", "log_sigmoid_backward", "hardswish",
        "hardswish_backward", "hardtanh_backward", "hardsigmoid_backward", "elu_backward", "leaky_relu_backward",
        "softplus_backward", "softshrink_backward", "threshold_backward", "_prelu_kernel", "_prelu_kernel_backward",
        "huber_loss_backward", "smooth_l1_loss_backward", "mse_loss_backward", "binary_cross_entropy_backward",
        "native_dropout_backward", "rrelu_with_noise", "bucketize", "isin", "searchsorted",
    ),
}  # fmt: skip

SHARD_RULES: Mapping[str, ShardRule] = {
    **{name: rule for rule, names in _RULES.items() for name in names},
    **VIEW_RULES,
    **INDEX_RULES,
    **ROW_RULES,
}
"""By the name of the operation in torch.ops.aten."""
