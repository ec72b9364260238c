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
        dtype: of the first result; of a product in fp8 that of its operands.
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
        flops = 0
        num_bytes = 0
        for kernel, count in launches.items():
            flops += count * kernel.flops
            num_bytes += count * kernel.num_bytes
        parts = tuple(launches.items())
        return KernelBatch("batch", "", flops, num_bytes, parts=parts)


NO_KERNEL = ("empty", "set_", "resize_", "detach", "lift", "alias", "record_stream", "_has")
"""Beginnings of names of operations without a kernel, besides views."""


def kernel_of(
    func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor], args: Sequence[Any]
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
        sizes = _attention_sizes(packet, args)
        return KernelLaunch("attention", dtype, flops, num_bytes, sizes)
    if packet in (aten._scaled_mm, aten._scaled_grouped_mm):
        dtype = str(args[0].dtype).removeprefix("torch.")
    if packet in GEMM_SIZES:
        batch, rows, columns, inner = GEMM_SIZES[packet](args)
        flops = 2 * batch * rows * columns * inner
        sizes = (batch, rows, columns, inner)
        return KernelLaunch("gemm", dtype, flops, num_bytes, sizes)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, out_val=_whole_result(packet, args, outputs))
        return KernelLaunch("gemm", dtype, flops, num_bytes)
    return KernelLaunch("memory", dtype, 0, num_bytes)


def _whole_result(packet: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
    """What a call returned, with None for the gradients of a convolution that nothing needs."""
    if packet is torch.ops.aten.convolution_backward:
        given = iter(outputs)
        *_, needed = args
        return tuple(next(given) if is_needed else None for is_needed in needed)
    return outputs[0] if len(outputs) == 1 else outputs


def _distinct_bytes(tensors: Sequence[Tensor]) -> int:
    by_identity = {id(tensor): tensor for tensor in tensors}
    total = 0
    for tensor in by_identity.values():
        total += tensor.numel() * tensor.element_size()
    return total


def _changed_bytes(func: Any, args: Sequence[Any]) -> int:
    """Size of the positional arguments that the call changes in place."""
    changed: list[Tensor] = []
    arguments = func._schema.arguments
    for argument, value in zip(arguments, args, strict=False):
        alias = argument.alias_info
        if alias is None or not alias.is_write:
            continue
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


def _grouped_mm(args: Sequence[Any]) -> GemmSizes:
    """Tokens x a matrix of each group, or sums over each group's tokens: as one product of all tokens."""
    left, right = args[0], args[1]
    return 1, left.shape[0], right.shape[-1], left.shape[1]


GEMM_SIZES: dict[Any, Callable[[Sequence[Any]], GemmSizes]] = {
    aten.mm: _mm,
    aten.addmm: _addmm,
    aten.bmm: _bmm,
    aten.baddbmm: _baddbmm,
    aten._grouped_mm: _grouped_mm,
    aten._scaled_mm: _mm,
    aten._scaled_grouped_mm: _grouped_mm,
}


def attended_pairs(num_queries: int, num_keys: int, *, causal: bool) -> int:
    """Pairs of a query and a key that it attends to, where query i attends to keys 0..i or to all."""
    if not causal:
        return num_queries * num_keys
    whole_rows = max(0, num_queries - num_keys)
    triangle_rows = num_queries - whole_rows
    in_triangle = triangle_rows * (triangle_rows + 1) // 2
    return in_triangle + whole_rows * num_keys


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, products: int) -> int:
    """Of `products` matrix products over the attended pairs, each as wide as the mean of the head
    sizes of q and v.
    """
    batch, heads, num_queries, head_size = q.shape
    num_keys = k.shape[2]
    value_size = v.shape[3]
    pairs = attended_pairs(num_queries, num_keys, causal=causal)
    flops_a_pair = products * (head_size + value_size)
    return batch * heads * pairs * flops_a_pair


def _attention_sizes(packet: Any, args: Sequence[Any]) -> tuple[int, ...]:
    first = FIRST_QUERY.get(packet, 0)
    queries = args[first]
    keys = args[first + 1]
    batch, heads, num_queries, head_size = queries.shape
    num_keys = keys.shape[2]
    return batch * heads, num_queries, num_keys, head_size


def _is_set(args: Sequence[Any], place: int) -> bool:
    """Whether an argument is True; arguments at the end that are their defaults are left out."""
    return len(args) > place and bool(args[place])


def _cpu_flash(args: Sequence[Any]) -> int:
    q, k, v = args[:3]
    causal = _is_set(args, 4)
    return _attention_flops(q, k, v, causal=causal, products=2)


def _cpu_flash_backward(args: Sequence[Any]) -> int:
    q, k, v = args[1:4]
    causal = bool(args[7])
    return _attention_flops(q, k, v, causal=causal, products=5)


def _flash(args: Sequence[Any]) -> int:
    q, k, v = args[:3]
    return _attention_flops(q, k, v, causal=_is_set(args, 4), products=2)


def _efficient(args: Sequence[Any]) -> int:
    q, k, v = args[:3]
    return _attention_flops(q, k, v, causal=_is_set(args, 6), products=2)


def _gpu_backward(args: Sequence[Any]) -> int:
    """FLOPs of the backward of flash attention and of the memory-efficient kernel."""
    q, k, v = args[1:4]
    return _attention_flops(q, k, v, causal=_is_set(args, 11), products=5)


ATTENTION_FLOPS: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_flash,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_flash_backward,
    aten._scaled_dot_product_flash_attention: _flash,
    aten._scaled_dot_product_flash_attention_backward: _gpu_backward,
    aten._scaled_dot_product_efficient_attention: _efficient,
    aten._scaled_dot_product_efficient_attention_backward: _gpu_backward,
}
"""FLOPs of fused attention. The forward is 2 matrix products (scores, output), the backward 5, of
which one computes the scores again. Only attended pairs count. Source: Dao 2023 (FlashAttention-2).
"""

FIRST_QUERY = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
    aten._scaled_dot_product_flash_attention_backward: 1,
    aten._scaled_dot_product_efficient_attention_backward: 1,
}
"""Position of the queries among the arguments, where they are not the first one."""
