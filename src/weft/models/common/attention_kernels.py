"""Attention of one block of queries to one block of keys, forward and backward: torch's fused kernels, and a plain one.

Note [Blocks add up]
    With scores s = scale q k^T and lse = log sum exp(s) over the keys of a block, the softmax over
    several blocks is the blocks' outputs weighted by exp(lse - global lse). And the gradients of
    one block, computed with the *global* output and lse, are its part of the global gradients: dq,
    dk and dv of all blocks just add up. Nothing but q, out and lse is saved, no S x S scores exist.
    Source: Dao 2023 (FlashAttention-2); Liu et al. 2023 (ring attention).

All kernels take q_BHSK, k_BGTK and v_BGTK (T keys, G divides H) of one head size and return
out_BHSK and lse_BHS.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.attention_choice import (
    FLASH_CAPABILITY,
    AttentionDevice,
    KernelName,
    choose_block_kernel,
)
from weft.models.common.dropout import has_no_memory

aten: Any = torch.ops.aten

NO_WEIGHT = float("-inf")

CUDNN_CAPABILITY = (9, 0)
CUDNN_VERSION = 90100
"""From which on cuDNN's attention is called."""


@dataclass(frozen=True)
class Scores:
    """How the scores of a block are computed.

    Attributes:
        scale: factor of q k^T.
        causal: query i attends to keys 0..i of the block.
        mask: [B or 1, 1, Sq, Sk] or None, True where a query attends to a key; excludes `causal`.
        softcap: scores s become softcap * tanh(s / softcap).
        head_bias: slopes [H]: scores get -slope * distance.
        distance: query column - key column, [Sq, Sk]; given with `head_bias`.
        factors: of dropout, by number type: the weights of the softmax are multiplied by these,
            [B, H, Sq, Sk]; lse is that of all keys.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    softcap: float | None = None
    head_bias: Tensor | None = None
    distance: Tensor | None = None
    factors: Callable[[torch.dtype], Tensor] | None = None

    @property
    def change_weights(self) -> bool:
        """Whether scores or weights are others than those of a fused kernel."""
        others = (self.softcap, self.head_bias, self.factors)
        return any(other is not None for other in others)

    def drawn_factors(self, weights: Tensor) -> Tensor | float:
        """What weights of this type, and their gradients, are multiplied with."""
        if self.factors is None or has_no_memory(weights):
            return 1.0
        return self.factors(weights.dtype)


class BlockGradients(NamedTuple):
    """Gradients of one block, shaped like q, k and v, and like the slopes where there are any."""

    q: Tensor
    k: Tensor
    v: Tensor
    head_bias: Tensor | None = None


class Block(NamedTuple):
    """Queries, keys and values of one block."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def head_size(self) -> int:
        """The larger one of the head sizes of keys and values."""
        return max(self.q.shape[-1], self.v.shape[-1])

    def padded(self, size: int) -> Block:
        """With zeros behind each head, up to a head size: they change no score."""
        return Block(pad_head(self.q, size), pad_head(self.k, size), pad_head(self.v, size))


class BlockOutput(NamedTuple):
    """Output over all blocks, and the gradient that it received."""

    grad: Tensor
    out: Tensor
    lse: Tensor


Forward = Callable[[Block, Scores], tuple[Tensor, Tensor]]
"""block, scores -> out, lse."""

Backward = Callable[[Block, BlockOutput, Scores], BlockGradients]
"""block, output, scores -> gradients."""


class Kernel(NamedTuple):
    """An attention kernel. Both functions take q, k and v of one head size, a multiple of
    `head_unit`.
    """

    forward: Forward
    backward: Backward
    head_unit: int = 1


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of sums over blocks: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def attend(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, *, device: AttentionDevice | None = None
) -> tuple[Tensor, Tensor]:
    """q_BHSK, k_BGTK, v_BGTW (T keys, G divides H) -> out_BHSW and lse_BHS, float32 at least.

    A query that attends to no key has output 0 and lse -inf.

    Args:
        device: whose kernel has its shapes and memory computed, on the meta device.
    """
    block = Block(q, k, v)
    kernel = _choose_kernel(block, scores, device)
    size = _padded_head_size(kernel, block)
    padded_out, lse = kernel.forward(block.padded(size), scores)
    out = _unpad(padded_out, v)
    if scores.mask is not None:
        # kernels disagree on rows without a key: 0 and lse 0, or not a number
        attends_to_nothing = ~scores.mask.any(-1)
        out = out.masked_fill(attends_to_nothing.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(attends_to_nothing, NO_WEIGHT)
    return out, lse


def attend_backward(
    block: Block, output: BlockOutput, scores: Scores, *, device: AttentionDevice | None = None
) -> BlockGradients:
    """The block's part of the gradients, from the output over all blocks."""
    kernel = _choose_kernel(block, scores, device)
    size = _padded_head_size(kernel, block)
    padded_output = BlockOutput(pad_head(output.grad, size), pad_head(output.out, size), output.lse)
    padded = kernel.backward(block.padded(size), padded_output, scores)
    return BlockGradients(
        _unpad(padded.q, block.q),
        _unpad(padded.k, block.k),
        _unpad(padded.v, block.v),
        padded.head_bias,
    )


def attention_device(x: Tensor) -> AttentionDevice:
    """The device of a tensor, and what torch offers on it; the meta device stands for a CPU, a
    tensor without values for one of a GPU of any kind.
    """
    if not x.is_cuda:
        return AttentionDevice("cpu")
    if has_no_memory(x):
        return AttentionDevice("cuda", FLASH_CAPABILITY)
    found = _gpu(x.device)
    if found.has_cudnn and torch.are_deterministic_algorithms_enabled():
        return replace(found, has_cudnn=False)  # its backward adds in any order
    return found


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> AttentionDevice:
    capability = torch.cuda.get_device_capability(device)
    version = torch.backends.cudnn.version() or 0
    is_new = capability >= CUDNN_CAPABILITY and version >= CUDNN_VERSION
    return AttentionDevice(
        "cuda",
        capability,
        has_varlen=varlen_with_windows() is not None,
        has_cudnn=is_new and torch.backends.cuda.cudnn_sdp_enabled(),
    )


@lru_cache(maxsize=1)
def varlen_with_windows() -> Callable[..., Any] | None:
    """`torch.nn.attention.varlen.varlen_attn`, if this torch has it with windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"window_size", "enable_gqa"} <= set(parameters) else None


def _choose_kernel(block: Block, scores: Scores, planned: AttentionDevice | None) -> Kernel:
    own = attention_device(block.q)
    device = planned if planned is not None and block.q.is_meta else own
    name = choose_block_kernel(
        str(block.q.dtype).removeprefix("torch."),
        block.head_size,
        device,
        has_mask=scores.mask is not None,
        needs_scores=scores.change_weights,
    )
    if name == "flash" and device.kind == "cpu":
        return CPU
    return CUDA_KERNELS[name]


def _padded_head_size(kernel: Kernel, block: Block) -> int:
    """Fused kernels take one head size for q, k and v, a multiple of their unit."""
    unit = kernel.head_unit
    num_units = -(-block.head_size // unit)  # rounded up
    return num_units * unit


def pad_head(x: Tensor, size: int) -> Tensor:
    """Zeros behind each head, up to a head size."""
    missing = size - x.shape[-1]
    if not missing:
        return x
    return F.pad(x, (0, missing))


def _unpad(padded: Tensor, like: Tensor) -> Tensor:
    """Without the zeros behind each head."""
    size = like.shape[-1]
    return padded[..., :size]


def _mask_as_bias(scores: Scores, dtype: torch.dtype) -> Tensor | None:
    mask = scores.mask
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, NO_WEIGHT)


def _cpu_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *block,
        0.0,
        scores.causal,
        attn_mask=_mask_as_bias(scores, block.q.dtype),
        scale=scores.scale,
    )
    return out, lse


def _cpu_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        output.grad,
        *block,
        output.out,
        output.lse,
        0.0,
        scores.causal,
        attn_mask=_mask_as_bias(scores, block.q.dtype),
        scale=scores.scale,
    )
    return BlockGradients(dq, dk, dv)


def _flash_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *block, 0.0, scores.causal, False, scale=scores.scale
    )
    return out, lse


def _flash_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=block.q.device)  # as forward's
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        output.grad,
        *block,
        output.out,
        output.lse.contiguous(),
        None,
        None,
        block.q.shape[2],
        block.k.shape[2],
        0.0,
        scores.causal,
        no_dropout_state,
        no_dropout_state,
        scale=scores.scale,
    )
    return BlockGradients(dq, dk, dv)


def _cudnn_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse_BHS1, *_ = aten._scaled_dot_product_cudnn_attention(
        *block, None, True, 0.0, scores.causal, False, scale=scores.scale
    )
    return out, lse_BHS1.view(out.shape[:3])


def _cudnn_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    no_dropout_state = torch.zeros((), dtype=torch.int64, device=block.q.device)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        output.grad,
        *block,
        output.out,
        output.lse.contiguous().unsqueeze(-1),
        no_dropout_state,
        no_dropout_state,
        None,
        None,
        None,
        block.q.shape[2],
        block.k.shape[2],
        0.0,
        scores.causal,
        scale=scores.scale,
    )
    return BlockGradients(dq, dk, dv)


EFFICIENT_ROWS = 32
"""The memory-efficient kernel keeps lse in rows of a multiple of this."""
EFFICIENT_BIAS = 16
"""The memory-efficient kernel reads a bias whose rows lie a multiple of this apart."""


def _efficient_bias(q: Tensor, k: Tensor, scores: Scores) -> Tensor | None:
    bias = _mask_as_bias(scores, q.dtype)
    if bias is None:
        return None
    num_keys = k.shape[2]
    batch_size, num_heads, *_ = q.shape
    missing = -num_keys % EFFICIENT_BIAS
    aligned = F.pad(bias, (0, missing))[..., :num_keys]
    return aligned.expand(batch_size, num_heads, -1, -1)


def _repeat_heads(x_BGTK: Tensor, q_BHSK: Tensor) -> Tensor:
    group_size = q_BHSK.shape[1] // x_BGTK.shape[1]
    return x_BGTK.repeat_interleave(group_size, dim=1)


def _sum_heads(x_BHTK: Tensor, k_BGTK: Tensor) -> Tensor:
    """Gradients of repeated key heads -> of the heads themselves."""
    grouped: Tensor = x_BHTK.unflatten(1, (k_BGTK.shape[1], -1))
    return grouped.sum(2)


def _efficient_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = block
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q,
        _repeat_heads(k, q),
        _repeat_heads(v, q),
        _efficient_bias(q, k, scores),
        True,
        0.0,
        scores.causal,
        scale=scores.scale,
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    q, k, v = block
    missing_rows = -output.lse.shape[-1] % EFFICIENT_ROWS
    padded_lse = F.pad(output.lse, (0, missing_rows))
    # the kernel for 16 bits reads the output where its forward leaves it, [B, S, H, K], whatever its strides
    out = output.out.transpose(1, 2).contiguous().transpose(1, 2)
    no_dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        output.grad,
        q,
        _repeat_heads(k, q),
        _repeat_heads(v, q),
        _efficient_bias(q, k, scores),
        out,
        padded_lse.contiguous(),
        no_dropout_state,
        no_dropout_state,
        0.0,
        (True, True, True, False),
        scores.causal,
        scale=scores.scale,
    )
    return BlockGradients(dq, _sum_heads(dk, k), _sum_heads(dv, k))


def _per_key_head(x_BHQK: Tensor, num_key_heads: int) -> Tensor:
    """Rows of the queries that share a head of keys, one head after another: [B, G, H/G Q, K]. One
    product then serves all of them, and sums their gradients.
    """
    by_key_head: Tensor = x_BHQK.unflatten(1, (num_key_heads, -1))
    return by_key_head.flatten(2, 3)


def _per_query_head(x_BGRK: Tensor, num_queries: int) -> Tensor:
    """Undo the grouping of query heads by key head."""
    by_query_head: Tensor = x_BGRK.unflatten(2, (-1, num_queries))
    return by_query_head.flatten(1, 2)


def _raw_scores(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """Before soft-cap, bias and mask: [B, H, Sq, Sk]."""
    dots = _per_key_head(q, k.shape[1]) @ k.transpose(-1, -2)
    return _per_query_head(dots, q.shape[2]).to(wide_dtype(q.dtype)) * scores.scale


def _final_scores(raw: Tensor, scores: Scores) -> Tensor:
    """Capped, biased and masked: [B, H, Sq, Sk]."""
    final = raw
    if scores.softcap is not None:
        final = scores.softcap * torch.tanh(raw / scores.softcap)
    if scores.head_bias is not None and scores.distance is not None:
        slopes = scores.head_bias[:, None, None]
        final = final - slopes * scores.distance
    allowed = scores.mask
    if scores.causal:
        square = torch.ones_like(raw[:1, :1], dtype=torch.bool)
        allowed = square.tril()
    if allowed is None:
        return final
    return final.masked_fill(~allowed, NO_WEIGHT)


def _plain_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = block
    raw = _raw_scores(q, k, scores)
    final = _final_scores(raw, scores)
    lse = final.logsumexp(-1)
    weights = final.softmax(-1)
    if scores.factors is not None:
        weights = weights * scores.drawn_factors(weights)
    weights = weights.to(v.dtype)
    out = _per_key_head(weights, v.shape[1]) @ v
    return _per_query_head(out, q.shape[2]), lse


def _plain_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    q, k, v = block
    grad, out, lse = output
    wide = lse.dtype
    num_queries, num_key_heads = q.shape[2], k.shape[1]
    raw = _raw_scores(q, k, scores)
    final = _final_scores(raw, scores)
    # by the lse of all blocks: the weights that these keys have in the whole softmax
    weights = torch.exp(final - lse.unsqueeze(-1))
    rows_of_grad = _per_key_head(grad, num_key_heads)
    dweights = _per_query_head(rows_of_grad @ v.transpose(-1, -2), num_queries).to(wide)
    # the output over all blocks, of which this one is a part
    dots = grad.to(wide) * out
    mean_dweights = dots.sum(-1, keepdim=True)
    dropped = weights
    if scores.factors is not None:
        factors = scores.drawn_factors(weights)
        dropped = weights * factors
        dweights = dweights * factors
    dfinal = weights * (dweights - mean_dweights)
    dhead_bias: Tensor | None = None
    if scores.head_bias is not None and scores.distance is not None:
        by_slope = dfinal * scores.distance
        dhead_bias = -by_slope.sum((0, 2, 3))
    draw = dfinal
    if scores.softcap is not None:
        capped = torch.tanh(raw / scores.softcap)
        slope = 1 - capped.square()
        draw = dfinal * slope
    dscaled = _per_key_head((draw * scores.scale).to(q.dtype), num_key_heads)
    narrow_weights = _per_key_head(dropped.to(q.dtype), num_key_heads)
    return BlockGradients(
        _per_query_head(dscaled @ k, num_queries),
        dscaled.transpose(-1, -2) @ _per_key_head(q, num_key_heads),
        narrow_weights.transpose(-1, -2) @ rows_of_grad,
        dhead_bias,
    )


CPU = Kernel(_cpu_forward, _cpu_backward)
"""float64, float32, bfloat16, float16; masks; fewer key heads. Returns shapes on the meta device,
too.
"""
CUDA_FLASH = Kernel(_flash_forward, _flash_backward, head_unit=8)
"""bfloat16 and float16 without a mask; fewer key heads."""
CUDA_CUDNN = Kernel(_cudnn_forward, _cudnn_backward, head_unit=8)
"""As flash, faster from Hopper on."""
CUDA_EFFICIENT = Kernel(_efficient_forward, _efficient_backward, head_unit=8)
"""float32 and 16-bit types, with a mask as a bias; as many key heads as query heads."""
PLAIN = Kernel(_plain_forward, _plain_backward)
"""Every feature, with all scores of the block in memory: what no fused kernel computes, and the
reference in tests.
"""
CUDA_KERNELS: Mapping[KernelName, Kernel] = {
    "flash": CUDA_FLASH,
    "cudnn": CUDA_CUDNN,
    "efficient": CUDA_EFFICIENT,
    "plain": PLAIN,
}
