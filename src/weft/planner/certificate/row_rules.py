"""Rules for shards of operations that mix entries along some dims alone: scans, FFTs, convolutions, pooling, linear algebra."""

from __future__ import annotations

from collections.abc import Mapping

from weft.parallel.tensor.dims import ShardingError, is_sharded, whole_dim, whole_dims
from weft.parallel.tensor.traced_op import places_named
from weft.planner.certificate.axis_types import PARTIAL, AxisType, UntypedError, of_dims, replicated
from weft.planner.certificate.rule_parts import (
    ShardRule,
    TypedOp,
    apart,
    asked_for,
    broadcast,
    check_whole,
)


def _along_dim(op: TypedOp) -> list[AxisType]:
    """cumsum, flip, fft, ...: along the dims that an argument names; all where it names none."""
    written = op.args.get("dim", op.args.get("dims"))
    return apart(op, places_named(op.dims, written))


def _gated(op: TypedOp) -> list[AxisType]:
    """glu and its backward: halves of a dim."""
    return apart(op, [op.args.get("dim", -1) % op.outputs[0].dim()])


def _of_sequences(op: TypedOp) -> list[AxisType]:
    """Pooling, resizing, padding, patches: of each sequence or image; the first dim counts them."""
    for dims in op.operands:
        check_whole(op, dims, range(1, len(dims)))
    first = broadcast(op, [dims[:1] for dims in op.operands], op.shape[:1])
    return [of_dims((*first, *whole_dims(out.shape[1:]))) for out in op.outputs]


def _of_matrices(op: TypedOp) -> list[AxisType]:
    """linalg: of the matrices in the last two dims; results may have other last dims."""
    num_batch = len(op.dims) - 2
    for dims in op.operands:
        check_whole(op, dims, range(min(num_batch, len(dims)), len(dims)))
    batches = [dims[:num_batch] for dims in op.operands]
    batch = broadcast(op, batches, op.shape[:num_batch])
    return [of_dims((*batch, *whole_dims(out.shape[num_batch:]))) for out in op.outputs]


def _distances(op: TypedOp) -> list[AxisType]:
    """_cdist_forward and backward: of the rows of pairs of matrices."""
    num_batch = len(op.shape) - 2
    for dims in op.operands:
        check_whole(op, dims, range(num_batch, len(dims)))
    batch = broadcast(op, [dims[:num_batch] for dims in op.operands], op.shape[:num_batch])
    return [of_dims((*batch, *whole_dims(op.shape[num_batch:])))]


def _convolution(op: TypedOp) -> list[AxisType]:
    """x_NCL, weight, bias -> [N, O, L]: of each sequence; partial where input channels are sharded."""
    x, weight, *biases = op.operands
    check_whole(op, x, range(2, len(x)))
    check_whole(op, weight, range(2, len(weight)))
    channels_in, channels_out = (0, 1) if op.args["transposed"] else (1, 0)
    is_by_group = op.args["groups"] > 1
    of_result = weight[channels_out]
    if is_sharded(x[1]) != is_sharded(weight[0 if is_by_group else channels_in]):
        raise ShardingError("convolution of sharded channels with whole ones")
    if is_sharded(x[1]) and not is_by_group:
        if biases or is_sharded(x[0]) or is_sharded(of_result):
            raise UntypedError("convolution with a sum over sharded channels")
        return [PARTIAL]
    for bias in biases:
        if is_sharded(bias[0]) != is_sharded(of_result):
            raise ShardingError("convolution of a sharded weight and a whole bias")
    features = x[1] if is_by_group else of_result
    kept = features if is_sharded(features) else whole_dim(op.shape[1])
    return [of_dims((x[0], kept, *whole_dims(op.shape[2:])))]


def _convolution_backward(op: TypedOp) -> list[AxisType]:
    """Gradients of x, of the weight and of the bias: the last two are sums over all sequences."""
    gradient, x, weight = op.operands
    for dims in (gradient, x, weight):
        check_whole(op, dims, range(1, len(dims)))
    check_whole(op, weight, [0])
    is_partial = is_sharded(gradient[0]) or is_sharded(x[0])
    shape = tuple(op.args["weight"].shape)
    of_weight = PARTIAL if is_partial else replicated(shape)
    of_bias = PARTIAL if is_partial else replicated(tuple(op.args["bias_sizes"] or ()))
    dx = of_dims((gradient[0], *whole_dims(op.args["input"].shape[1:])))
    return asked_for(op, [dx, of_weight, of_bias])


def _group_norm(op: TypedOp) -> list[AxisType]:
    """native_group_norm: of each sequence; statistics have sequences and groups."""
    x, *params = op.operands
    check_whole(op, x, range(1, len(x)))
    for dims in params:
        check_whole(op, dims, [0])
    return [of_dims((x[0], *whole_dims(out.shape[1:]))) for out in op.outputs]


def _group_norm_backward(op: TypedOp) -> list[AxisType]:
    gradient, x, *_ = op.operands
    for dims in (gradient, x):
        check_whole(op, dims, range(1, len(dims)))
    channels = replicated((op.args["C"],))
    of_params = PARTIAL if is_sharded(gradient[0]) or is_sharded(x[0]) else channels
    dx = of_dims((gradient[0], *whole_dims(op.args["input"].shape[1:])))
    return asked_for(op, [dx, of_params, of_params])


def _attention(op: TypedOp) -> list[AxisType]:
    raise UntypedError(f"{op.name} outside of Attend")


_RULES: Mapping[ShardRule, tuple[str, ...]] = {
    _along_dim: (
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll", "_fft_r2c", "_fft_c2c", "_fft_c2r",
        "_safe_softmax",
    ),
    _gated: ("glu", "glu_backward"),
    _of_sequences: (
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward", "avg_pool3d", "avg_pool3d_backward",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d", "adaptive_max_pool2d",
        "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d_backward", "upsample_nearest1d",
        "upsample_nearest1d_backward", "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_linear1d",
        "upsample_linear1d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward", "upsample_bicubic2d",
        "upsample_bicubic2d_backward", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "reflection_pad1d",
        "reflection_pad1d_backward", "reflection_pad2d", "reflection_pad2d_backward", "replication_pad1d",
        "replication_pad1d_backward", "replication_pad2d", "replication_pad2d_backward", "im2col", "col2im",
        "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    ),
    _of_matrices: (
        "linalg_inv_ex", "linalg_solve_triangular", "linalg_cholesky_ex", "_linalg_solve_ex", "_linalg_det",
        "_linalg_slogdet", "linalg_qr", "_linalg_eigh", "_linalg_svd", "linalg_matrix_exp", "linalg_lu_factor_ex",
        "triangular_solve", "cholesky_solve",
    ),
    _distances: ("_cdist_forward", "_cdist_backward"),
    _convolution: ("convolution",),
    _convolution_backward: ("convolution_backward",),
    _group_norm: ("native_group_norm",),
    _group_norm_backward: ("native_group_norm_backward",),
    _attention: ("scaled_dot_product_attention",),
}  # fmt: skip

ROW_RULES: Mapping[str, ShardRule] = {
    name: rule for rule, names in _RULES.items() for name in names
}
"""By the name of the operation in torch.ops.aten."""
