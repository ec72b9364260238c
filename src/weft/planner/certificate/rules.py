"""Types of an operation's results along one axis, from those of its operands: what is linear in partial sums.

Operations of the backward are typed by the same rules as those of the forward. What is computed of
shards is in `shard_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.parallel.tensor.dims import DimFactor, ShardingError
from weft.parallel.tensor.propagate import rule_of
from weft.planner.certificate.axis_types import (
    PARTIAL,
    UNTYPED,
    VARYING,
    ZERO,
    AxisType,
    TypeMismatchError,
    UntypedError,
    of_dims,
    replicated,
)
from weft.planner.certificate.rule_parts import TypedOp, entrywise
from weft.planner.certificate.shard_rules import SHARD_RULES

SAME_ENTRIES = frozenset({
    "view", "_unsafe_view", "reshape", "unflatten", "flatten", "_reshape_alias", "transpose", "t", "permute", "unsqueeze",
    "squeeze", "expand", "repeat", "split", "unsafe_split", "split_with_sizes", "slice", "select", "unbind", "cat", "stack",
    "constant_pad_nd", "repeat_interleave", "_to_copy", "contiguous", "detach", "alias", "clone", "copy_", "index_select",
    "narrow", "as_strided", "lift_fresh", "slice_backward", "select_backward", "index", "gather", "tril", "triu",
    "roll", "flip", "_to_dense", "diagonal", "diagonal_backward", "diag_embed", "unfold", "unfold_backward", "im2col",
    "view_as_real", "view_as_complex", "pixel_shuffle", "pixel_unshuffle", "_conj", "_conj_physical", "squeeze_",
    "unsqueeze_", "movedim", "swapaxes",
})  # fmt: skip
"""Operations that move entries: a partial tensor stays partial, zeros stay zeros."""
LINEAR = frozenset({
    "sum", "neg", "cumsum", "mean", "trace", "avg_pool2d", "_adaptive_avg_pool2d", "col2im", "_fft_r2c", "_fft_c2c",
    "_fft_c2r", "upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d",
    "reflection_pad1d", "replication_pad1d", "reflection_pad2d", "replication_pad2d",
})  # fmt: skip
SUMS = frozenset({"add", "add_", "sub", "sub_", "rsub", "stack", "cat", "lerp"})
"""Operations all of whose tensors must be partial where one is."""
PRODUCTS = frozenset(
    {"mul", "mul_", "mm", "bmm", "matmul", "dot", "mv", "outer", "linear", "convolution"}
)
"""Operations that are linear in each tensor: one of them may be partial."""
MATRIX_SUMS = frozenset({"addmm", "addmm_", "baddbmm", "addcmul", "addcmul_"})
"""A sum and a product: a + b c."""
ACCUMULATES = frozenset(
    {
        "index_put_",
        "_index_put_impl_",
        "index_put",
        "index_add_",
        "index_add",
        "scatter_add_",
        "scatter_add",
    }
)
"""Operations that add to a tensor."""
QUOTIENTS = frozenset({"div", "div_"})
SOLVE = "linalg_solve_triangular"
"""Linear in its second tensor."""
NLL_BACKWARD = frozenset({"nll_loss_backward", "nll_loss2d_backward"})
CHOICES = frozenset({"where", "masked_fill", "masked_fill_"})
CONSTANTS = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros", "new_ones",
    "new_full", "new_empty_strided", "empty_strided", "bernoulli", "bernoulli_", "exponential_", "uniform_", "normal_",
    "geometric_", "random_", "cauchy_", "log_normal_",
})  # fmt: skip
"""Operations that read no entry of their tensors: constants and random draws fit shards as well as
whole tensors.
"""
ZEROS = frozenset({"zeros_like", "new_zeros", "zero_", "zeros"})
NUMBERS = frozenset({"scalar_tensor", "full"})
"""Operations that make a tensor of one number."""
FILLS = frozenset({"zero_", "fill_"})


def result_types(func: Any, op: TypedOp, operands: Sequence[AxisType]) -> list[AxisType]:
    """The types of the results along one axis.

    Args:
        operands: types of the tensors among the arguments, in order; their dims are in `op`.

    Raises:
        TypeMismatchError: the operands do not fit together.
        UntypedError: the operation has no rule for these types.
    """
    kinds = {each.kind for each in operands}
    shapes = [tuple(out.shape) for out in op.outputs]
    if op.name in ZEROS:
        return [ZERO for _ in shapes]
    if op.name in FILLS or op.name in CONSTANTS:
        return list(map(constant, shapes))
    if "untyped" in kinds:
        return [UNTYPED for _ in shapes]
    if "varying" in kinds:
        return [VARYING for _ in shapes]
    if "partial" in kinds:
        return _of_partial(op, operands)
    if _stays_zero(op, operands):
        return [ZERO for _ in shapes]
    if kinds <= {"replicated", "zero"}:
        return _of_replicated(func, op, operands)
    return _of_dims(func, op, operands)


def constant(shape: tuple[int, ...]) -> AxisType:
    """Of a tensor whose entries depend on no tensor."""
    return of_dims(tuple((DimFactor(size, repeated=True),) for size in shape))


def _of_replicated(func: Any, op: TypedOp, operands: Sequence[AxisType]) -> list[AxisType]:
    """Of whole tensors; where entries are equal along a dim, the rule says whether they still are."""
    whole = [replicated(tuple(out.shape)) for out in op.outputs]
    if not _has_repeated(op, operands):
        return whole
    try:
        found = _of_dims(func, op, operands)
    except (TypeMismatchError, UntypedError):
        return whole  # it needs no rule
    return found if len(found) == len(whole) else whole


def _stays_zero(op: TypedOp, operands: Sequence[AxisType]) -> bool:
    """Whether zeros make the result zero."""
    kinds = [each.kind for each in operands]
    if not kinds or "zero" not in kinds:
        return False
    if op.name in PRODUCTS:
        return True
    if op.name in ("index", "gather", "index_select", "copy_"):
        source = kinds[1] if op.name == "copy_" else kinds[0]
        return source == "zero"
    moves = op.name in SAME_ENTRIES or op.name in ("sum", "neg")
    is_sum = op.name in SUMS and "other" not in _number_arguments(op)
    return (moves or is_sum) and all(kind == "zero" for kind in kinds)


def _has_repeated(op: TypedOp, operands: Sequence[AxisType]) -> bool:
    """Whether equal entries are to be followed: they fit shards as well as whole tensors."""
    if op.name in ("expand", "repeat") or any(each.kind == "zero" for each in operands):
        return True
    return any(
        factor.repeated
        for each in operands
        for dim in each.dims
        for factor in dim
        if factor.size > 1
    )


def _number_arguments(op: TypedOp) -> set[str]:
    """Arguments that are numbers other than 0."""
    return {
        name for name, value in op.args.items() if isinstance(value, (int, float)) and value != 0
    }


# partial sums


def _of_partial(op: TypedOp, operands: Sequence[AxisType]) -> list[AxisType]:
    """Results of a partial operand: partial where the operation is linear in it."""
    kinds = [each.kind for each in operands]
    partial = [PARTIAL for _ in op.outputs]
    name = op.name
    if name in SUMS:
        if "other" in _number_arguments(op):
            raise TypeMismatchError("a number is added to a partial sum, once on every rank")
        _need_all_partial(op, kinds)
        return partial
    if name in PRODUCTS:
        _need_one_partial(op, kinds)
        return partial
    if name in MATRIX_SUMS:
        first, *factors = kinds
        product: AxisType = ZERO
        if "partial" in factors:
            _need_one_partial(op, factors)
            product = PARTIAL
        elif "zero" not in factors:
            product = AxisType("replicated")
        _need_all_partial(op, [first, product.kind])
        return partial
    if name in QUOTIENTS:
        if kinds[1:] and kinds[1] == "partial":
            raise TypeMismatchError("a number is divided by a partial sum")
        return partial
    if name == SOLVE and kinds[0] != "partial":
        return partial
    if name in CHOICES:
        return _choice(op, kinds)
    if name in ("copy_",):
        return [operands[1]]
    if name in ACCUMULATES or (name == "scatter" and "src" in op.args):
        values = kinds[-1]
        _need_all_partial(op, [kinds[0], values])
        return partial
    if name in SAME_ENTRIES or name in LINEAR:
        if kinds[0] != "partial":
            raise TypeMismatchError(f"the index of {name} is a partial sum")
        return partial
    if (
        name.endswith(("_backward", "_backward_data", "_backward_for_cpu"))
        and kinds[0] == "partial"
    ):
        # linear in the gradient of the result, which is the first tensor
        return [PARTIAL for _ in op.outputs]
    if name in NLL_BACKWARD and "partial" not in kinds[:-1]:
        return SHARD_RULES[name](op)  # the number of targets, which a sum does not read
    raise TypeMismatchError(f"{name} of a partial sum is not the sum of what it is on each rank")


def _need_all_partial(op: TypedOp, kinds: Sequence[str]) -> None:
    others = set(kinds) - {"partial", "zero"}
    if others:
        (other, *_) = sorted(others)
        raise TypeMismatchError(
            f"{op.name} of a partial tensor and a {other} one: a sum over ranks is missing"
        )


def _need_one_partial(op: TypedOp, kinds: Sequence[str]) -> None:
    if list(kinds).count("partial") > 1:
        raise TypeMismatchError(f"{op.name} of two partial sums")
    if "sharded" in kinds:
        raise TypeMismatchError(
            f"{op.name} of a partial tensor and a sharded one: a sum over ranks is missing"
        )


def _choice(op: TypedOp, kinds: Sequence[str]) -> list[AxisType]:
    """where(condition, a, b); masked_fill(x, mask, number)."""
    if op.name == "where":
        condition, *values = kinds
        if len(values) < 2 and op.args.get("other") not in (None, 0, 0.0):
            raise TypeMismatchError("where puts a number into a partial sum, once on every rank")
        if condition == "partial":
            raise TypeMismatchError("the condition of where is a partial sum")
        _need_all_partial(op, values)
    elif len(kinds) < 3 and op.args.get("value") not in (0, 0.0):
        raise TypeMismatchError("masked_fill puts a number into a partial sum, once on every rank")
    return [PARTIAL for _ in op.outputs]


def _of_dims(func: Any, op: TypedOp, operands: Sequence[AxisType]) -> list[AxisType]:
    found = _by_rule(func, op)
    adds_to_whole = op.name in ACCUMULATES and operands[0].kind not in ("zero", "partial")
    if adds_to_whole and PARTIAL in found:
        raise TypeMismatchError(f"{op.name} of shards to a tensor that every rank holds")
    return found


def _by_rule(func: Any, op: TypedOp) -> list[AxisType]:
    rule = SHARD_RULES.get(op.name)
    try:
        if rule is not None:
            return rule(op)
        if torch.Tag.pointwise in func.tags:
            return entrywise(op)
        dims_rule = rule_of(func)
        if dims_rule is None:
            raise UntypedError(op.name)
        return list(map(of_dims, dims_rule(op)))
    except ShardingError as error:
        raise TypeMismatchError(str(error)) from None
