"""Which dims of an operation's output are sharded, from those of its inputs: one rule per torch operation.

An operation that mixes entries along a sharded dim (a softmax, a slice, a product that sums over
it) computes something else on a shard than on the whole tensor: its rule raises `ShardingError`, as
does an operation without a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.parallel.tensor import shape_rules
from weft.parallel.tensor.dims import (
    Dim,
    Dims,
    ShardingError,
    is_sharded,
    length,
    whole_dim,
    with_dim,
)
from weft.parallel.tensor.traced_op import (
    Rule,
    TracedOp,
    broadcast_dims,
    places_named,
    reject_sharded,
    reject_sums_over,
)


def _elementwise(op: TracedOp) -> list[Dims]:
    found: list[Dims] = []
    for out in op.outputs:
        shape = tuple(out.shape)
        found.append(broadcast_dims(op.name, op.operands, shape))
    return found


def _linear(op: TracedOp) -> list[Dims]:
    x, weight, *biases = op.operands
    reject_sums_over(op, x[-1], weight[1])
    features = weight[0]
    for bias in biases:
        if is_sharded(bias[0]) != is_sharded(features):
            raise ShardingError(
                "linear whose weight is sharded and whose bias is not, or the other way round"
            )
    return [(*x[:-1], features)]


def _convolution(op: TracedOp) -> list[Dims]:
    """x[B, C, ...] with weight[O, C / groups, ...]: output channels may be sharded where all input
    channels are there, and channels of a depthwise one, each of which reads its own.
    """
    x, weight, *biases = op.operands
    batch, channels, *space = x
    outputs, *kernel = weight
    reject_sums_over(op, *space, *kernel)
    is_depthwise = op.args["groups"] == length(channels) and channels == outputs
    if is_sharded(channels) and not is_depthwise:
        raise ShardingError(
            "convolution over sharded channels, and only a depthwise one keeps them apart",
            fix="functional convolutions with groups=x.shape[1]; or name axes that are not sharded",
        )
    if is_sharded(outputs) and not is_depthwise and op.args["groups"] != 1:
        raise ShardingError("convolution of groups whose output channels are sharded")
    if op.args["transposed"]:
        raise ShardingError("transposed convolution of sharded channels has no rule")
    if any(is_sharded(bias[0]) != is_sharded(outputs) for bias in biases):
        raise ShardingError(
            "convolution whose weight is sharded and whose bias is not, or the other way round"
        )
    return [(batch, outputs, *map(whole_dim, op.shape[2:]))]


def _matrix_product(op: TracedOp) -> list[Dims]:
    """mm, bmm, addmm, baddbmm: [..., N, K] x [..., K, M]."""
    *_, left, right = op.operands
    *left_batch, rows, left_inner = left
    *right_batch, right_inner, columns = right
    reject_sums_over(op, left_inner, right_inner)
    for left_dim, right_dim in zip(left_batch, right_batch, strict=True):
        if is_sharded(left_dim) != is_sharded(right_dim):
            raise ShardingError(f"{op.name} of a sharded batch dim with a whole one")
    return [(*left_batch, rows, columns)]


def _reduction(op: TracedOp) -> list[Dims]:
    """Operations along `dim`, or over all entries: allowed where that dim is whole."""
    places = places_named(op.dims, op.args.get("dim"))
    reject_sharded(op, places)
    found: list[Dims] = []
    for out in op.outputs:
        keeps_dims = out.dim() == len(op.dims)
        dims: list[Dim] = []
        for place, dim in enumerate(op.dims):
            if place not in places:
                dims.append(dim)
            elif keeps_dims:
                dims.append(whole_dim(out.shape[place]))
        found.append(tuple(dims))
    return found


def _norm(op: TracedOp) -> list[Dims]:
    num_dims = len(op.dims)
    num_normalized = len(op.args["normalized_shape"])
    normalized = range(num_dims - num_normalized, num_dims)
    reject_sharded(op, normalized)
    return shape_rules.same_dims(op)


def _as_complex(op: TracedOp) -> list[Dims]:
    """view_as_complex: pairs of the last dim are numbers."""
    reject_sharded(op, [len(op.dims) - 1])
    return [op.dims[:-1]]


def _as_real(op: TracedOp) -> list[Dims]:
    return [(*op.dims, whole_dim(2))]


def _embedding(op: TracedOp) -> list[Dims]:
    table, index, *_ = op.operands
    rows, features = table
    reject_sums_over(op, rows)
    return [(*index, features)]


def _index_select(op: TracedOp) -> list[Dims]:
    place = op.place()
    reject_sharded(op, [place])
    index = op.operands[1]
    return [with_dim(op.dims, place, index[0])]


def _index(op: TracedOp) -> list[Dims]:
    """x[:, index]: along one whole dim, by numbers."""
    indices = op.args["indices"]
    places = [place for place, index in enumerate(indices) if index is not None]
    if len(places) > 1 or indices[places[0]].dtype in (torch.bool, torch.uint8):
        raise ShardingError("index of a sharded tensor along several dims, or by a mask")
    reject_sharded(op, places)
    return [with_dim(op.dims, places[0], *op.operands[1])]


def _triangle(op: TracedOp) -> list[Dims]:
    num_dims = len(op.dims)
    rows_and_columns = (num_dims - 2, num_dims - 1)
    reject_sharded(op, rows_and_columns)
    return [op.dims]


def _attention(op: TracedOp) -> list[Dims]:
    """[B, H, S, K]: heads may be sharded, of queries, keys and values alike; one key/value head
    serves all queries.
    """
    q, k, v = op.operands[:3]
    for dims in (q, k, v):
        reject_sums_over(op, *dims[2:])
    q_heads, k_heads, v_heads = q[1], k[1], v[1]
    has_one_kv_head = length(k_heads) == 1 and not is_sharded(k_heads)
    if not has_one_kv_head:
        kinds = {is_sharded(heads) for heads in (q_heads, k_heads, v_heads)}
        if len(kinds) > 1:
            raise ShardingError("attention of sharded heads with whole ones")
    return [(*q[:-1], v[-1])]


def _copy_into(op: TracedOp) -> list[Dims]:
    """dst.copy_(src): dst holds what src held."""
    source = op.operands[1]
    dims = broadcast_dims(op.name, [source], op.shape)
    return [dims]


_RULES: dict[Rule, tuple[str, ...]] = {
    shape_rules.same_dims: (
        "_to_copy", "contiguous", "detach", "alias", "lift_fresh", "zeros_like", "ones_like", "empty_like", "full_like",
        "rand_like", "randn_like", "bernoulli", "bernoulli_", "native_dropout", "zero_", "fill_", "clone", "_conj",
    ),
    shape_rules.view: ("view", "_unsafe_view", "reshape", "unflatten", "flatten", "_reshape_alias"),
    shape_rules.transpose: ("transpose", "t"),
    shape_rules.permute: ("permute",),
    shape_rules.unsqueeze: ("unsqueeze",),
    shape_rules.squeeze: ("squeeze",),
    shape_rules.expand: ("expand", "repeat"),
    shape_rules.split_dim: ("split", "split_with_sizes", "slice"),
    shape_rules.select: ("select", "unbind"),
    shape_rules.cat: ("cat", "concat", "concatenate"),
    shape_rules.stack: ("stack",),
    shape_rules.pad: ("constant_pad_nd", "pad"),
    shape_rules.repeat_interleave: ("repeat_interleave",),
    _linear: ("linear",),
    _convolution: ("convolution",),
    _matrix_product: ("mm", "bmm", "addmm", "baddbmm"),
    _reduction: (
        "sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "prod", "any", "all", "argmax", "argmin",
        "softmax", "_softmax", "log_softmax", "_log_softmax", "logsumexp", "cumsum", "cumprod", "linalg_vector_norm",
        "norm", "topk", "sort", "argsort", "flip", "roll",
    ),
    _norm: ("rms_norm", "layer_norm", "native_layer_norm", "_fused_rms_norm"),
    _embedding: ("embedding",),
    _index_select: ("index_select",),
    _index: ("index",),
    _triangle: ("tril", "triu"),
    _attention: ("scaled_dot_product_attention",),
    _copy_into: ("copy_",),
    _as_complex: ("view_as_complex",),
    _as_real: ("view_as_real",),
}  # fmt: skip

RULES: Mapping[str, Rule] = {name: rule for rule, names in _RULES.items() for name in names}
"""Rule of each operation, by its name in torch.ops.aten; elementwise ones are known by their tag.
"""


def rule_of(func: Any) -> Rule | None:
    """The rule of an operation, if it has one."""
    name = func.overloadpacket.__name__
    rule = RULES.get(name) if func._overloadname != "other" else None  # max, min of two tensors
    if rule is None and torch.Tag.pointwise in func.tags:
        return _elementwise
    return rule


def arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by their names in the operation's schema."""
    by_name: dict[str, Any] = {}
    parameters = func._schema.arguments
    for parameter, value in zip(parameters, args, strict=False):
        by_name[parameter.name] = value
    by_name.update(kwargs)
    return by_name
