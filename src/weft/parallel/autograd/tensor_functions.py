"""What torch's functions do with their arguments: elementwise ones, those that change one, those that read no values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _foreach_supported_types as types_of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as types_of_clipping

SAME_ENTRIES = frozenset(
    [
        "alias",
        "bfloat16",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "double",
        "fill_",
        "float",
        "half",
        "to",
        "type",
        "type_as",
        "zero_",
        "multiply",
        "subtract",
        "negative",
        "floor_divide",
        "masked_fill",
    ]
)
"""Functions of each entry that torch does not mark as such."""
LOCAL_READS = frozenset(
    [
        "__get__",
        "__set__",
        "__delete__",
        "as_subclass",
        "backward",
        "data_ptr",
        "detach_",
        "element_size",
        "get_device",
        "is_coalesced",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_pinned",
        "is_shared",
        "_is_view",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "share_memory_",
        "storage_offset",
        "untyped_storage",
    ]
)
"""Functions that read properties or memory of this rank, and no values. Properties of the shape are defined by
the class itself.
"""
OPERATORS = {
    "truediv": "div",
    "rtruediv": "div",
    "rdiv": "div",
    "floordiv": "floor_divide",
    "rfloordiv": "floor_divide",
}
"""Names of Python's operators -> of torch's functions, where they differ."""
VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
"""Properties that have values."""
NARROW = (torch.bfloat16, torch.float16)
LISTS = ("_foreach_", "_fused_")
"""Beginnings of the names of functions of lists of tensors."""
REDUCTIONS = frozenset({"max", "min", "_foreach_max", "_foreach_norm"})
"""Functions that reduce to fewer entries, some of which torch marks as elementwise for other arguments."""

STATISTICS = frozenset(
    """
    matmul mm bmm mv dot vdot inner outer kron tensordot einsum chain_matmul addmm addbmm addmv baddbmm svd qr inverse
    pinverse cholesky trace cov corrcoef cosine_similarity sort argsort msort topk kthvalue argmax argmin median nanmedian
    quantile nanquantile mode unique var std var_mean std_mean prod softmax log_softmax logsumexp cumsum cumprod normalize
    """.split()  # noqa: SIM905 - words, not code
)
"""Functions that compute an entry of several ones of each argument, besides those of `torch.linalg`, and
besides sums, means, extremes and norms.
"""


@cache
def is_elementwise(func: Callable[..., Any]) -> bool:
    """Whether each entry of the result depends on the same entry of the arguments, and on scalars."""
    name: str = getattr(func, "__name__", "")
    if name in REDUCTIONS:
        return False
    if name.startswith(LISTS):
        return True
    base = _base_name(name)
    return name in SAME_ENTRIES or base in SAME_ENTRIES or _is_pointwise(base)


def in_wide_type(values: Tensor) -> Tensor:
    """Values of 16 bits in float32, in which torch adds them: a rank's sum is not rounded before it is added
    to others.
    """
    return values.float() if values.dtype in NARROW else values


def in_type_of(values: Tensor, total: Tensor) -> Tensor:
    """The total of `in_wide_type(values)` in the type that torch's function of `values` has."""
    return total.to(values.dtype) if values.dtype in NARROW else total


@cache
def is_statistic(func: Callable[..., Any]) -> bool:
    """Whether it multiplies or decomposes matrices, or computes an entry of several in another way."""
    name: str = getattr(func, "__name__", "")
    return name.startswith("linalg_") or _base_name(name) in STATISTICS


@cache
def changes_first_argument(func: Callable[..., Any]) -> bool:
    """Whether the function writes into its first argument."""
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_", "detach_")


@cache
def is_local_read(func: Callable[..., Any]) -> bool:
    """Whether it reads no values, but what is alike for the whole tensor and this rank's entries."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        descriptor = getattr(func, "__self__", None)
        return getattr(descriptor, "__name__", "") not in VIEW_PROPERTIES
    return name in LOCAL_READS


def take_in_lists(kind: type[Tensor]) -> None:
    """Have optimizers and clipping take all tensors of a class on a GPU in one call, as torch does for DTensor."""
    for supported in (types_of_optimizers, types_of_clipping):
        if kind not in supported:
            supported.append(kind)


def _base_name(name: str) -> str:
    """`add` of `add_`, `__add__`, `__radd__` and `__iadd__`."""
    if not name.startswith("__"):
        return name.removesuffix("_")
    operator = name.strip("_")
    if operator in OPERATORS:
        return OPERATORS[operator]
    for prefix in ("r", "i"):
        shorter = operator.removeprefix(prefix)
        if shorter != operator and hasattr(Tensor, f"__{shorter}__"):
            return OPERATORS.get(shorter, shorter)
    return operator


def _is_pointwise(name: str) -> bool:
    for each in (name, f"{name}_"):
        packet = getattr(torch.ops.aten, each, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            if torch.Tag.pointwise in getattr(packet, overload).tags:
                return True
    return False
