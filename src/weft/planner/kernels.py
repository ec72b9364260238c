"""Work of tensor operations: floating-point operations and bytes moved, from the shapes of ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten: Any = torch.ops.aten

Kind = Literal["gemm", "attention", "memory", "batch"]
"""A matrix product (or convolution), a fused attention kernel, an operation bound by memory, or a
`KernelBatch` of those.
"""


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of an operation; equal shapes give equal kernels.

    Attributes:
        dtype: of the first result.
        flops: multiplications and additions.
        num_bytes: size of all distinct inputs and outputs, twice of those that are changed in
            place: what must move at least.
        sizes: of a gemm: batch, rows, columns and inner length; of attention: heads (of all
            samples), queries, keys and head size; else ().
    """

    kind: Kind
    dtype: str
    flops: int
    num_bytes: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KernelBatch(KernelLaunch):
    """Several launches one after another; it equals itself alone.

    Attributes:
        parts: each kernel, and how often it is launched.
    """

    parts: tuple[tuple[KernelLaunch, int], ...] = ()

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @staticmethod
    def of(launches: Mapping[KernelLaunch, int]) -> KernelBatch:
        """The batch of these launches."""
        parts = tuple(launches.items())
        flops = sum(count * kernel.flops for kernel, count in parts)
        num_bytes = sum(count * kernel.num_bytes for kernel, count in parts)
        return KernelBatch("batch", "", flops, num_bytes, parts=parts)


NO_KERNEL = ("empty", "set_", "resize_", "detach", "lift", "alias", "record_stream", "_has")
"""Beginnings of names of operations without a kernel, besides views."""


def kernel_of(
    func: Any,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    args: Sequence[Any],
) -> KernelLaunch | None:
    """The kernel of one ATen call; None for a view and whatever else computes nothing.

    Args:
        func: the overload, as a dispatch mode receives it.
        inputs, outputs: tensors among its arguments and results.
        args: positional arguments.
    """
    name = func._schema.name.removeprefix("aten::")
    tensors = (*outputs, *inputs)
    if not tensors or func.is_view or name.startswith(NO_KERNEL):
        return None
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    num_bytes = _distinct_bytes(tensors) + _changed_bytes(func, args)
    packet = func.overloadpacket
    if packet in ATTENTION_FLOPS:
        flops = ATTENTION_FLOPS[packet](args)
        return KernelLaunch("attention", dtype, flops, num_bytes, _attention_sizes(packet, args))
    if packet in GEMM_SIZES:
        batch, rows, columns, inner = GEMM_SIZES[packet](args)
        flops = 2 * batch * rows * columns * inner
        return KernelLaunch("gemm", dtype, flops, num_bytes, (batch, rows, columns, inner))
    if packet in flop_registry:
        flops = flop_registry[packet](*args, out_val=outputs[0] if len(outputs) == 1 else outputs)
        return KernelLaunch("gemm", dtype, flops, num_bytes)
    return KernelLaunch("memory", dtype, 0, num_bytes)


def _distinct_bytes(tensors: Sequence[Tensor]) -> int:
    by_identity = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in by_identity.values())


def _changed_bytes(func: Any, args: Sequence[Any]) -> int:
    """Size of the positional arguments that the call changes in place."""
    changed: list[Tensor] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            changed.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return _distinct_bytes(changed)


GemmSizes = tuple[int, int, int, int]


def _mm(args: Sequence[Any]) -> GemmSizes:
    left, right = args[0], args[1]
    return 1, left.shape[0], right.shape[1], left.shape[1]


def _addmm(args: Sequence[Any]) -> GemmSizes:
    return _mm(args[1:])


def _bmm(args: Sequence[Any]) -> GemmSizes:
    left, right = args[0], args[1]
    return left.shape[0], left.shape[1], right.shape[2], left.shape[2]


def _baddbmm(args: Sequence[Any]) -> GemmSizes:
    return _bmm(args[1:])


GEMM_SIZES: dict[Any, Callable[[Sequence[Any]], GemmSizes]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _baddbmm,
}


def attended_pairs(num_queries: int, num_keys: int, *, causal: bool) -> int:
    """Pairs of a query and a key that it attends to, where query i attends to keys 0..i or to all."""
    if not causal:
        return num_queries * num_keys
    whole_rows = max(0, num_queries - num_keys)
    triangle_rows = num_queries - whole_rows
    return triangle_rows * (triangle_rows + 1) // 2 + whole_rows * num_keys


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, products: int) -> int:
    """Of `products` matrix products over the attended pairs, each as wide as the mean of the head
    sizes of q and v.
    """
    batch, heads, num_queries, head_size = q.shape
    pairs = attended_pairs(num_queries, k.shape[2], causal=causal)
    return batch * heads * pairs * products * (head_size + v.shape[3])


def _attention_sizes(packet: Any, args: Sequence[Any]) -> tuple[int, ...]:
    first = FIRST_QUERY.get(packet, 0)
    queries, keys = args[first], args[first + 1]
    batch, heads, num_queries, head_size = queries.shape
    return batch * heads, num_queries, keys.shape[2], head_size


def _cpu_flash(args: Sequence[Any]) -> int:
    causal = bool(args[4]) if len(args) > 4 else False
    return _attention_flops(args[0], args[1], args[2], causal=causal, products=2)


def _cpu_flash_backward(args: Sequence[Any]) -> int:
    return _attention_flops(args[1], args[2], args[3], causal=bool(args[7]), products=5)


ATTENTION_FLOPS: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_flash_backward,
}
"""FLOPs of fused attention. The forward is 2 matrix products (scores, output), the backward 5, of
which one computes the scores again. Only attended pairs count. Source: Dao 2023 (FlashAttention-2).
"""

FIRST_QUERY = {aten._scaled_dot_product_flash_attention_for_cpu_backward: 1}
"""Position of the queries among the arguments, where they are not the first one."""
